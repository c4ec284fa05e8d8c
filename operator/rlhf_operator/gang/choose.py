"""Chooses the backend of a job from its fields and from the APIs that the cluster serves. Rule: pure.

A named mode that cannot be used is a problem for the user.
"""

from collections.abc import Mapping
from typing import Final

from rlhf_api.job import RLHFJob
from rlhf_common.conditions import PlannedReason
from rlhf_operator.gang.apis import APIS, ServedApis
from rlhf_operator.gang.backend import GangChoice
from rlhf_operator.gang.members import DEFAULT_SCHEDULER, schedulers
from rlhf_operator.gang.none import NoGangBackend
from rlhf_operator.gang.registry import BACKENDS, BackendKind

_FIELD: Final = "spec.scheduling.gang.mode"
_NONE: Final = NoGangBackend()
_WAYS_ON: Final = (
    ", or remove the label to start without quota. The operator's administrator can let jobs start despite such "
    "labels: scheduling.ignoreQueueLabels: true in the values of its chart"
)


def choose(job: RLHFJob, served: ServedApis, backends: Mapping[str, BackendKind] = BACKENDS) -> GangChoice:
    """Return the backend of a job on a cluster that serves these APIs."""
    mode, named = job.spec.scheduling.gang.mode, schedulers(job)
    if mode not in ("Disabled", "Auto") and len(named) > 1:
        return _invalid(_two_schedulers(named))
    if mode == "Auto":
        return _auto(job, served, named, backends)
    note = "; ".join(
        f"{asked} has no effect with {_FIELD}: {mode}"
        for other, kind in backends.items()
        if other != mode and (asked := kind.asked_by(job))
    )
    if mode == "Disabled":
        return GangChoice(_NONE, note=note)
    version = served.version(mode)
    if version is None:
        return GangChoice(_NONE, problem=f"{_FIELD}: {mode}: {_why_not(mode, served, backends)}, or use Auto")
    if lacking := backends[mode].lacks(job):
        return _invalid(f"{_FIELD}: {mode}: {lacking}")
    return GangChoice(backends[mode].make(version), note=note)


def _auto(job: RLHFJob, served: ServedApis, named: set[str], backends: Mapping[str, BackendKind]) -> GangChoice:
    notes = []
    for mode, kind in backends.items():
        if not (asked := kind.asked_by(job)):
            continue
        if (version := served.version(mode)) is not None:
            return GangChoice(kind.make(version)) if len(named) < 2 else _invalid(_two_schedulers(named))
        why = _why_not(mode, served, backends)
        if not served.ignores_labels:
            return GangChoice(_NONE, waits=f"{asked} asks for a queue, and {why}{_WAYS_ON}")
        notes.append(f"{asked} has no effect: {why}")
    note = "; ".join(notes)
    if len(named) > 1:
        return GangChoice(_NONE, note=note)
    [scheduler] = named or {DEFAULT_SCHEDULER}
    for mode, kind in backends.items():
        if kind.scheduler == scheduler and (version := served.version(mode)) is not None:
            return GangChoice(kind.make(version), note=note)
    return GangChoice(_NONE, note=note)


def _invalid(problem: str) -> GangChoice:
    return GangChoice(_NONE, problem=problem, reason=PlannedReason.INVALID)


def _why_not(mode: str, served: ServedApis, backends: Mapping[str, BackendKind]) -> str:
    if mode in served.off:
        value = f"scheduling.{mode.lower()}"
        return f"this operator may not use it: set {value}: true in the values of its chart"
    wanted = " or ".join(version for version, _ in APIS[mode])
    return f"the cluster does not serve {wanted}: {backends[mode].remedy}"


def _two_schedulers(named: set[str]) -> str:
    listed = ", ".join(sorted(named))
    return f"spec.*.template.spec.schedulerName: {listed}: one gang has one scheduler: name the same in all templates"
