"""Conditions of the status: merges the observed state with the stored conditions, so that transition times stay.

Rule: pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Self

from rlhf_common.conditions import (
    AdmittedReason,
    ConditionType,
    FinishedReason,
    PlannedReason,
    ResizingReason,
    RestartingReason,
    RunningReason,
    SuspendedReason,
)
from rlhf_operator.reconcile.reconcile_plan import JobEvent
from rlhf_operator.reconcile.timestamps import rfc3339
from rlhf_operator.untrusted import clean

Json = dict[str, Any]

MESSAGE_MAX: Final = 2048
"""Most characters of a condition's message."""
_DEFAULTS: Final[dict[ConditionType, tuple[str, StrEnum, str]]] = {
    ConditionType.PLANNED: ("Unknown", PlannedReason.PLANNED, "not looked at yet"),
    ConditionType.ADMITTED: ("True", AdmittedReason.NO_QUEUE, "no queueing system is used"),
    ConditionType.RUNNING: ("False", RunningReason.PENDING, "not started yet"),
    ConditionType.RESIZING: ("False", ResizingReason.STABLE, "all groups have the size that the spec asks for"),
    ConditionType.RESTARTING: ("False", RestartingReason.NONE, "no pod is being replaced on purpose"),
    ConditionType.SUSPENDED: ("False", SuspendedReason.NOT_SUSPENDED, "spec.suspend is false"),
    ConditionType.COMPLETE: ("False", FinishedReason.NOT_FINISHED, "iterations are left"),
    ConditionType.FAILED: ("False", FinishedReason.NOT_FINISHED, "nothing ended the job"),
}
_SILENT: Final = frozenset(
    {RunningReason.PENDING, FinishedReason.NOT_FINISHED, AdmittedReason.NO_QUEUE, RestartingReason.NONE}
)
"""Reasons that cause no event."""
_NEWS_AT_FIRST: Final = frozenset({ConditionType.PLANNED, ConditionType.RUNNING})
"""Conditions that cause an event when they are new, also if they are not True, unless their reason is silent."""
_WARNINGS: Final = frozenset(
    {
        RunningReason.NAME_TAKEN,
        RunningReason.UNSCHEDULABLE,
        RunningReason.RELEASED,
        RunningReason.RECOVERING,
        RunningReason.FAILED,
        AdmittedReason.EVICTED,
        AdmittedReason.NOT_SERVED,
        ResizingReason.LIMITED,
    }
    | {RestartingReason.GROUP, RestartingReason.JOB}
)


@dataclass(frozen=True)
class ConditionUpdate:
    """The observation of one condition by a step of reconcile."""

    type: ConditionType
    status: bool
    reason: StrEnum
    message: str


@dataclass(frozen=True)
class StoredConditions:
    """The conditions in a stored status; one that it lacks has its default."""

    entries: Mapping[str, Mapping[str, Any]]
    """Type -> condition."""

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> Self:
        """Return the conditions of a stored status."""
        return cls({str(entry["type"]): dict(entry) for entry in status.get("conditions") or []})

    def holds(self, kind: ConditionType) -> bool:
        """Return whether a condition is True."""
        entry = self.entries.get(kind)
        return bool((entry["status"] if entry is not None else _DEFAULTS[kind][0]) == "True")

    def reason(self, kind: ConditionType) -> str:
        """Return the reason of a condition."""
        entry = self.entries.get(kind)
        return str(entry["reason"] if entry is not None else _DEFAULTS[kind][1])

    def message(self, kind: ConditionType) -> str:
        """Return the message of a condition."""
        entry = self.entries.get(kind)
        return str(entry["message"] if entry is not None else _DEFAULTS[kind][2])


def merged(
    stored: StoredConditions, updates: Iterable[ConditionUpdate], now: datetime, generation: int | None
) -> dict[ConditionType, Json]:
    """Return every condition by its type: its last update, else the stored one, else its default.

    `generation`: metadata.generation of the job that was observed.
    """
    conditions: dict[ConditionType, Json] = {}
    for kind, default in _DEFAULTS.items():
        entry = stored.entries.get(kind)
        conditions[kind] = dict(entry) if entry is not None else _entry(stored, kind, *default, now, generation)
    for update in updates:
        conditions[update.type] = _entry(
            stored, update.type, str(update.status), update.reason, update.message, now, generation
        )
    return conditions


def written(conditions: Mapping[ConditionType, Json]) -> list[Json]:
    """Return `status.conditions` in the order of ConditionType, without types that others added."""
    return [conditions[kind] for kind in ConditionType]


def transition_events(stored: StoredConditions, conditions: Mapping[ConditionType, Json]) -> list[JobEvent]:
    """Return an event for each condition whose status or reason has changed, without silent reasons.

    Events with the same reason are one. A new condition that is not True needs to be in _NEWS_AT_FIRST.
    """
    events = []
    for kind, now in conditions.items():
        before = stored.entries.get(kind)
        if before is None and now["status"] != "True" and kind not in _NEWS_AT_FIRST:
            before = now
        changed = before is None or (before["status"], before["reason"]) != (now["status"], now["reason"])
        if changed and now["reason"] not in _SILENT:
            events.append(JobEvent(_event_reason(kind, now), _first_line(now), _warns(kind, now)))
    # A finished job has two such conditions, its own and its phase; one event is enough.
    return list({event.reason: event for event in events}.values())


def _entry(
    stored: StoredConditions,
    kind: ConditionType,
    status: str,
    reason: StrEnum,
    message: str,
    now: datetime,
    generation: int | None,
) -> Json:
    previous, message = stored.entries.get(kind, {}), clean(message)
    moved = previous.get("status") != status
    entry = {
        "type": kind.value,
        "status": status,
        "reason": reason.value,
        "message": shortened(message),
        "lastTransitionTime": rfc3339(now) if moved else previous["lastTransitionTime"],
    }
    return entry if generation is None else {**entry, "observedGeneration": generation}


def shortened(message: str, most: int = MESSAGE_MAX) -> str:
    """Return the message, shortened to at most `most` characters."""
    return message if len(message) <= most else message[: most - 1] + "…"


def _first_line(now: Json) -> str:
    """Return the first line; the status also has the log lines below it."""
    return str(now["message"]).partition("\n")[0]


def _event_reason(kind: ConditionType, now: Json) -> str:
    if kind is ConditionType.RUNNING and now["reason"] in (RunningReason.FAILED, RunningReason.COMPLETE):
        return str(now["reason"])
    if kind in (ConditionType.FAILED, ConditionType.COMPLETE) and now["status"] == "True":
        return kind.value
    return str(now["reason"])


def _warns(kind: ConditionType, now: Json) -> bool:
    if kind is ConditionType.PLANNED:
        return bool(now["status"] != "True")
    failed = kind is ConditionType.FAILED and now["status"] == "True"
    return failed or now["reason"] in _WARNINGS
