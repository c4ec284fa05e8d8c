"""`rlhf suspend`, `rlhf resume`, `rlhf scale`: compute, check and send the change of the spec.

Rule: sizes that newly break a rule of the manifest are refused here.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlhf_api import manifest
from rlhf_api.problems import ManifestError, Problem
from rlhf_cli.cluster.cluster_job import ClusterJob
from rlhf_cli.cluster.cluster_session import ClusterSession
from rlhf_cli.cluster.errors import VerbError
from rlhf_common import names
from rlhf_common.conditions import ConditionType
from rlhf_common.names import ExitCode, Group

SCALABLE: Final = (Group.GENERATION, Group.INFERENCE)
_SIZE: Final = re.compile(r"\d{1,9}")


@dataclass(frozen=True)
class SpecChange:
    """A change of a job's spec, and its announcement."""

    patch: Mapping[str, Any]
    """JSON merge patch of the object; empty when there is nothing to change."""
    announcement: str
    """Text that is printed after the job's name."""


async def send(
    session: ClusterSession, name: str, change_of: Callable[[ClusterJob], SpecChange], *, dry_run: bool
) -> int:
    """Send the change of a job as one patch, or nothing when it has no effect. Return the exit code."""
    job = await session.job(name)
    change = change_of(job)
    if change.patch:
        await session.api.patch(names.PLURAL, job.namespace, name, dict(change.patch), dry_run=dry_run)
    suffix = " (dry run: nothing was changed)" if dry_run and change.patch else ""
    session.write([f"{name} {change.announcement}{suffix}"])
    return 0


def suspend(job: ClusterJob) -> SpecChange:
    """Return the change that sets spec.suspend to true. Raises VerbError for a finished job."""
    _check_not_finished(job, "suspended")
    if job.spec.get("suspend"):
        return SpecChange({}, f"is suspended already ({job.phase})")
    checkpoint_note = (
        "it saves a checkpoint and continues from it"
        if job.spec.get("checkpoints")
        else "spec.checkpoints is not set, so it will start from the beginning"
    )
    return SpecChange({"spec": {"suspend": True}}, f"will be suspended; {checkpoint_note} when it is resumed")


def resume(job: ClusterJob) -> SpecChange:
    """Return the change that sets spec.suspend to false. Raises VerbError for a finished job."""
    _check_not_finished(job, "resumed")
    if not job.spec.get("suspend"):
        return SpecChange({}, f"is not suspended ({job.phase})")
    if not job.spec.get("checkpoints"):
        return SpecChange(
            {"spec": {"suspend": False}}, "will start from the beginning, because spec.checkpoints is not set"
        )
    checkpoint = job.status.get("lastCheckpoint") or {}
    start = f"from iteration {checkpoint['iteration']}" if checkpoint.get("iteration") is not None else ""
    return SpecChange({"spec": {"suspend": False}}, f"will be resumed {start}".rstrip())


def scale(job: ClusterJob, sizes: Mapping[Group, int]) -> SpecChange:
    """Return the change of spec.<group>.replicas to `sizes` (group -> workers). Raises VerbError, ManifestError."""
    _check_not_finished(job, "scaled")
    before = {group: int((job.spec.get(group.value) or {}).get("replicas", 1)) for group in sizes}
    changed = {group: size for group, size in sizes.items() if before[group] != size}
    if not changed:
        return SpecChange({}, f"has {_listed(before)} already")
    patch = {"spec": {group.value: {"replicas": size} for group, size in changed.items()}}
    _check_rules(job, patch)
    steps = ", ".join(f"{group} {before[group]} -> {size}" for group, size in changed.items())
    return SpecChange(patch, f"is scaled: {steps}" + (" (when it is resumed)" if job.spec.get("suspend") else ""))


def parse_sizes(arguments: Sequence[str]) -> dict[Group, int]:
    """Parse arguments such as `generation=4` into group -> workers. Raises VerbError naming a wrong argument."""
    sizes: dict[Group, int] = {}
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if not separator or not _SIZE.fullmatch(value):
            raise VerbError(f"{argument!r}: give a group and a number, such as generation=4", ExitCode.USAGE)
        if name == Group.TRAINING:
            message = (
                "training=... : training ranks are pipeline x data x context x tensor of spec.training.parallelism, "
                "fixed for a job's life"
            )
            raise VerbError(message, ExitCode.USAGE)
        if name not in SCALABLE:
            raise VerbError(f"{argument!r}: no group {name!r}; generation and inference can be scaled", ExitCode.USAGE)
        if Group(name) in sizes:
            raise VerbError(f"{argument!r}: {name} occurs twice", ExitCode.USAGE)
        sizes[Group(name)] = int(value)
    return sizes


def _check_rules(job: ClusterJob, patch: Mapping[str, Any]) -> None:
    """Raise ManifestError for the rules that the change breaks; rules broken before it are ignored."""
    existing = {(problem.field, problem.message) for problem in _problems(job.body, {})}
    new = [problem for problem in _problems(job.body, patch) if (problem.field, problem.message) not in existing]
    if new:
        raise ManifestError(new, f"{job.namespace}/{job.name} as it would be")


def _problems(body: Mapping[str, Any], patch: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of the patched job, without line numbers, because it has no manifest file."""
    spec = {**body["spec"]}
    for group, fields in (patch.get("spec") or {}).items():
        spec[group] = {**(spec.get(group) or {}), **fields}
    metadata = {key: body["metadata"].get(key) for key in ("name", "namespace")}
    document = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": metadata, "spec": spec}
    try:
        manifest.parse(json.dumps(document), "")
    except ManifestError as error:
        return [Problem(problem.field, problem.value, problem.message) for problem in error.problems]
    return []


def _check_not_finished(job: ClusterJob, action: str) -> None:
    for kind in (ConditionType.COMPLETE, ConditionType.FAILED):
        if job.holds(kind):
            raise VerbError(
                f"{job.name} is {kind} and cannot be {action}: a finished job never runs again; create a new one"
            )


def _listed(sizes: Mapping[Group, int]) -> str:
    return ", ".join(f"{group} {size}" for group, size in sizes.items())
