"""The objects of a job, each field of each, against checked-in YAML; `RLHF_UPDATE_GOLDEN=1` rewrites it for review.

Each object is in the file, in full or as its differences from an object before it, whichever is shorter. The order of
the keys of the first job is in its file too.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_api.job import RLHFJob
from rlhf_common.names import Group
from rlhf_operator.manifests import Images, render

GOLDEN = Path(__file__).parent / "golden"
CERTIFICATES = {"ca.crt": b"authority", "tls.crt": b"certificate", "tls.key": b"key"}
IMAGES = Images(coordinator="example.org/operator:1", worker="example.org/worker:1")
JOB = "job.json"
NAMES = ("ppo-cpu", "grpo-gpu", "nodes-of-eight")
ABSENT = "(absent)"
"""Value of a field that the other object has and this one lacks."""


def job_of(name: str) -> RLHFJob:
    return RLHFJob.model_validate(yaml.safe_load((GOLDEN / f"{name}.job.yaml").read_text()))


def render_named(name: str) -> list[dict[str, Any]]:
    return render(job_of(name), CERTIFICATES, IMAGES, {Group.TRAINING: 2}).all


def dump(written: dict[str, Any]) -> str:
    return yaml.dump(written, Dumper=yaml.SafeDumper, sort_keys=False, width=120, default_flow_style=None)


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the new value of each field that differs; with `old` they determine `new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key, ABSENT), new.get(key, ABSENT), f"{path}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from differences(left, right, f"{path}/{place}")
    elif old != new:
        yield path, new


def as_yaml(body: dict[str, Any]) -> dict[str, Any]:
    """Return an object with the job of a ConfigMap as YAML instead of as a string of JSON."""
    if JOB not in body.get("data", {}):
        return body
    job = json.loads(body["data"][JOB])
    assert body["data"][JOB] == json.dumps(job, indent=2)
    return body | {"data": body["data"] | {JOB: job}}


def written(name: str) -> str:
    """Return the text of all objects of a job; the ConfigMap of the first job is before those of the others."""
    objects = [as_yaml(body) for body in render_named(name)]
    before = [] if name == NAMES[0] else [as_yaml(render_named(NAMES[0])[0])]
    parts = list[str]()
    for place, body in enumerate(objects):
        like = (
            {"like": other["metadata"]["name"]} | dict(differences(other, body))
            for other in before + objects[:place]
            if other["kind"] == body["kind"]
        )
        parts.append(min(map(dump, [body, *like]), key=len))
    return "---\n".join(parts)


@pytest.mark.parametrize("name", NAMES)
def test_objects_are_as_reviewed(name: str) -> None:
    text, golden = written(name), GOLDEN / f"{name}.objects.yaml"
    if os.environ.get("RLHF_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
