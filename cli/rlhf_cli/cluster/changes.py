"""suspend, resume, scale: the change of the spec that a verb means, checked before it is sent. Pure.

Rule: a change that the rules of the manifest forbid is refused here in the words of `rlhf validate`, without a request;
the API server checks it again. A change that changes nothing is none.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlhf_api import manifest
from rlhf_api.conditions import ConditionType
from rlhf_api.names import ExitCode, Group
from rlhf_api.problems import ManifestError, Problem
from rlhf_cli.cluster.errors import VerbError
from rlhf_cli.cluster.stored import Stored

SCALABLE: Final = (Group.GENERATION, Group.INFERENCE)
_SIZE: Final = re.compile(r"\d{1,9}")


@dataclass(frozen=True)
class Change:
    """What is to be sent, and what is said of it."""

    patch: Mapping[str, Any]
    """Merged into the object; empty for nothing to do."""
    told: str
    """In words, after the job's name."""


def suspend(job: Stored) -> Change:
    """spec.suspend: true."""
    _not_finished(job, "suspended")
    if job.spec.get("suspend"):
        return Change({}, f"is suspended already ({job.phase})")
    kept = (
        "it saves a checkpoint and goes on from there"
        if job.spec.get("checkpoints")
        else "spec.checkpoints is not set, so it will begin anew"
    )
    return Change({"spec": {"suspend": True}}, f"will be suspended; {kept} when it is resumed")


def resume(job: Stored) -> Change:
    """spec.suspend: false."""
    _not_finished(job, "resumed")
    if not job.spec.get("suspend"):
        return Change({}, f"is not suspended ({job.phase})")
    checkpoint = job.status.get("lastCheckpoint") or {}
    start = f"from iteration {checkpoint['iteration']}" if checkpoint.get("iteration") is not None else ""
    return Change({"spec": {"suspend": False}}, f"will be resumed {start}".rstrip())


def scale(job: Stored, sizes: Mapping[Group, int]) -> Change:
    """spec.<group>.replicas. Raises VerbError, ManifestError."""
    _not_finished(job, "scaled")
    before = {group: int((job.spec.get(group.value) or {}).get("replicas", 1)) for group in sizes}
    changed = {group: size for group, size in sizes.items() if before[group] != size}
    if not changed:
        return Change({}, f"has {_sizes(before)} already")
    patch = {"spec": {group.value: {"replicas": size} for group, size in changed.items()}}
    _check(job, patch)
    told = ", ".join(f"{group} {before[group]} -> {size}" for group, size in changed.items())
    return Change(patch, f"is scaled: {told}" + (" (when it is resumed)" if job.spec.get("suspend") else ""))


def parse_sizes(texts: Sequence[str]) -> dict[Group, int]:
    """`generation=4` ... as sizes. Raises VerbError naming the argument."""
    sizes: dict[Group, int] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not _SIZE.fullmatch(value):
            raise VerbError(f"{text!r}: give a group and a number, such as generation=4", ExitCode.USAGE)
        if name == Group.TRAINING:
            told = (
                "training=... : training ranks are pipeline x data of spec.training.parallelism, fixed for a job's life"
            )
            raise VerbError(told, ExitCode.USAGE)
        if name not in SCALABLE:
            raise VerbError(f"{text!r}: no group {name!r}; generation and inference can be scaled", ExitCode.USAGE)
        if Group(name) in sizes:
            raise VerbError(f"{text!r}: {name} is given twice", ExitCode.USAGE)
        sizes[Group(name)] = int(value)
    return sizes


def _check(job: Stored, patch: Mapping[str, Any]) -> None:
    """Raises ManifestError for what the change breaks; what was wrong before is none of its business."""
    wrong = _problems(job.body, patch)
    known = {(each.field, each.message) for each in _problems(job.body, {})}
    fresh = [each for each in wrong if (each.field, each.message) not in known]
    if fresh:
        raise ManifestError(fresh, f"{job.namespace}/{job.name} as it would be")


def _problems(body: Mapping[str, Any], patch: Mapping[str, Any]) -> list[Problem]:
    spec = {**body["spec"]}
    for group, fields in (patch.get("spec") or {}).items():
        spec[group] = {**(spec.get(group) or {}), **fields}
    meta = {key: body["metadata"].get(key) for key in ("name", "namespace")}
    document = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": meta, "spec": spec}
    try:
        manifest.parse(json.dumps(document), "")
    except ManifestError as error:
        return [Problem(each.field, each.value, each.message) for each in error.problems]
    return []


def _not_finished(job: Stored, what: str) -> None:
    for kind in (ConditionType.COMPLETE, ConditionType.FAILED):
        if job.holds(kind):
            told = f"{job.name} is {kind} and cannot be {what}: a finished job never runs again; create a new one"
            raise VerbError(told)


def _sizes(sizes: Mapping[Group, int]) -> str:
    return ", ".join(f"{group} {size}" for group, size in sizes.items())
