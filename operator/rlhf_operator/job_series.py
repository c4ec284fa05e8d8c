"""Computes the values of the metrics that every job has. Rule: pure.

The stored job may have been edited by hand: a value that is no number counts as 0.
"""

from collections import Counter as Tally
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from rlhf_api.job.scheduling import QUEUE_LABEL
from rlhf_api.rank_pods import gpus_a_pod
from rlhf_common.conditions import ConditionType, RunningReason
from rlhf_common.metrics import labels, operator
from rlhf_common.metrics.metric import Metric
from rlhf_operator.job_metrics import JobValues
from rlhf_operator.reconcile import ObservedJob
from rlhf_operator.reconcile.timestamps import time_of

_CONDITIONS: Final = frozenset(labels.CONDITION.values)
_PHASES: Final = frozenset(labels.JOB_PHASE.values)
_POD_PHASES: Final = frozenset(labels.POD_PHASE.values)
_GROUPS: Final = frozenset(labels.POD_GROUP.values)
MAX_QUEUE_CHARACTERS: Final = 253
"""Maximum characters of the name of a queue."""
_NOT_STARTED: Final = frozenset(
    {RunningReason.PENDING, RunningReason.STARTING, RunningReason.NAME_TAKEN, RunningReason.RELEASED}
)
"""Phases between which a job that cannot start changes, as one wait."""


class JobPhase(NamedTuple):
    """The phase of a job and its start."""

    name: str
    """Name of the phase; empty if there is none yet."""
    since: float
    """Start of the phase in seconds since 1970."""
    waits_since: float
    """Start of the wait that the phase belongs to, in seconds since 1970: of the first of _NOT_STARTED in a row."""


def phase_of(before: JobPhase | None, status: Mapping[str, Any], now: float) -> JobPhase:
    """Return the phase of a job and its start; `before` is the phase that this process knew last.

    Without `before`, a running job's phase starts when its condition's status changed, any other phase now.
    """
    running = next((item for item in status.get("conditions") or [] if item["type"] == ConditionType.RUNNING), None)
    reason = str(running["reason"]) if running is not None else ""
    name = reason if reason in _PHASES else ""
    if before is not None:
        if before.name == name:
            return before
        continues = before.name in _NOT_STARTED and name in _NOT_STARTED
        return JobPhase(name, now, before.waits_since if continues else now)
    became = time_of(running["lastTransitionTime"]) if running is not None else None
    if name == RunningReason.RUNNING and became is not None:
        return JobPhase(name, became.timestamp(), became.timestamp())
    return JobPhase(name, now, now)


def shared_values(
    job: Mapping[str, Any], observed: ObservedJob, status: Mapping[str, Any], phase: JobPhase
) -> JobValues:
    """Return the values that jobs in the same state share."""
    listed = (condition for condition in status.get("conditions") or [] if condition["type"] in _CONDITIONS)
    tally = Tally(
        (str(pod.group), pod.phase if pod.phase in _POD_PHASES else "Unknown") for pod in observed.pods.values()
    )
    ended = _mapping(status.get("restarts"))
    values: dict[Metric, Any] = {
        operator.CONDITION: {(str(item["type"]), str(item["status"])): 1.0 for item in listed},
        operator.PHASE: {(phase.name,): 1.0} if phase.name else {},
        operator.INFO: {(str(status.get("algorithm") or ""), _queue(job)): 1.0},
        operator.PODS: {place: float(count) for place, count in sorted(tally.items())},
        operator.RESTARTS: {
            ("failure",): _number(ended.get("failures")),
            ("disruption",): _number(ended.get("disruptions")),
        },
        operator.MEMORY_KILLS: {
            (str(group["name"]),): _number(group.get("outOfMemory"))
            for group in status.get("groups") or []
            if group["name"] in _GROUPS
        },
    }
    return values | _gpus(job, observed, status) | _sizes(observed, status)


def own_values(job: Mapping[str, Any], status: Mapping[str, Any], phase: JobPhase) -> JobValues:
    """Return the values that differ between jobs: times and progress."""
    values: dict[Metric, Any] = {operator.PHASE_SINCE: {(): phase.since}}
    created = time_of(job["metadata"].get("creationTimestamp"))
    if created is not None:
        values[operator.CREATED] = {(): created.timestamp()}
    if phase.name in labels.WAITING_REASONS:
        values[operator.WAITING_SINCE] = {(phase.name,): phase.waits_since}
    if progress := _mapping(status.get("progress")):
        values[operator.ITERATION] = {(): _number(progress.get("iteration"))}
        values[operator.ITERATIONS] = {(): _number(progress.get("iterations"))}
    return values


def _gpus(job: Mapping[str, Any], observed: ObservedJob, status: Mapping[str, Any]) -> dict[Metric, Any]:
    groups = {str(group["name"]): _number(group.get("desired")) for group in status.get("groups") or []}
    groups = {name: desired for name, desired in groups.items() if name in _GROUPS}
    each = {name: _gpus_of(job, name) for name in groups}
    placed = Tally(str(pod.group) for pod in observed.pods.values() if pod.scheduled is not None and not pod.over)
    return {
        operator.GPUS_REQUESTED: {(name,): each[name] * desired for name, desired in groups.items()},
        operator.GPUS_HELD: {(name,): each[name] * placed[name] for name in groups},
    }


def _gpus_of(job: Mapping[str, Any], group: str) -> float:
    return _number(gpus_a_pod(job.get("spec"), group))


def _sizes(observed: ObservedJob, status: Mapping[str, Any]) -> dict[Metric, Any]:
    groups = status.get("groups") or []
    desired = {
        (str(group["name"]),): _number(group.get("desired"))
        for group in groups
        if group["name"] in labels.RESIZED_GROUP.values
    }
    values: dict[Metric, Any] = {operator.POOL_DESIRED: desired}
    if (reading := observed.current_reading) is not None:
        values[operator.POOL] = {(): float(len(reading.pool))}
        values[operator.THRESHOLD] = {(): float(reading.threshold)}
        values[operator.STREAMS] = {(): float(reading.streams)}
    return values


def _queue(job: Mapping[str, Any]) -> str:
    """Return the queue that a job names: Kueue's in its label, or else Volcano's in the manifest; empty without one."""
    named = _mapping(job["metadata"].get("labels")).get(QUEUE_LABEL)
    gang = _mapping(_mapping(_mapping(job.get("spec")).get("scheduling")).get("gang"))
    return str(named or gang.get("queue") or "")[:MAX_QUEUE_CHARACTERS]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
