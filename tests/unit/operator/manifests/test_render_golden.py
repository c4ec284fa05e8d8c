"""The objects of a job, byte for byte against checked-in YAML; `RLHF_UPDATE_GOLDEN=1` rewrites it for review."""

import os
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


def job_of(name: str) -> RLHFJob:
    return RLHFJob.model_validate(yaml.safe_load((GOLDEN / f"{name}.job.yaml").read_text()))


def render_named(name: str) -> list[dict[str, Any]]:
    return render(job_of(name), CERTIFICATES, IMAGES, {Group.TRAINING: 2}).all


@pytest.mark.parametrize("name", ["ppo-cpu", "grpo-gpu", "nodes-of-eight"])
def test_objects_are_as_reviewed(name: str) -> None:
    rendered = yaml.dump_all(render_named(name), sort_keys=True, Dumper=yaml.SafeDumper, width=120)
    golden = GOLDEN / f"{name}.objects.yaml"
    if os.environ.get("RLHF_UPDATE_GOLDEN"):
        golden.write_text(rendered)
    assert rendered == golden.read_text()
