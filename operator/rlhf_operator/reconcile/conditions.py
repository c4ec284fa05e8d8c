"""Conditions of the status: merged with what was there, so that a time of transition is the time of the transition.

Rule: pure. Every type is present from the first visit on. An event belongs to a transition and to nothing else, so the
same observation made twice says nothing twice.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from rlhf_api.conditions import (
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
from rlhf_operator.untrusted import clean

Json = dict[str, Any]

MESSAGE_MAX: Final = 2048
"""Characters of a condition's message: a sentence or three, not a log."""
_FIRST: Final[dict[ConditionType, tuple[str, StrEnum, str]]] = {
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
"""Reasons that are no news."""
_TOLD_AT_FIRST: Final = frozenset({ConditionType.PLANNED, ConditionType.RUNNING})
"""Conditions that are news on the first visit already, whatever their status."""
_WARNINGS: Final = frozenset(
    {
        RunningReason.NAME_TAKEN,
        RunningReason.UNSCHEDULABLE,
        RunningReason.RELEASED,
        RunningReason.RECOVERING,
        RunningReason.FAILED,
        AdmittedReason.EVICTED,
    }
    | {RestartingReason.GROUP, RestartingReason.JOB}
)


class Conditions:
    """The conditions that this visit finds, on top of those of the last."""

    def __init__(self, before: Sequence[Mapping[str, Any]], now: datetime, generation: int | None) -> None:
        self._before = {str(each["type"]): dict(each) for each in before}
        self._now = now
        self._generation = generation
        self._found: dict[ConditionType, Json] = {}
        for kind, first in _FIRST.items():
            known = self._before.get(kind)
            if known is None:
                self.set(kind, *first)
            else:
                self._found[kind] = dict(known)

    def set(self, kind: ConditionType, status: str | bool, reason: StrEnum, message: str) -> None:
        """What is observed now."""
        text, message = str(status), clean(message)
        known = self._before.get(kind, {})
        moved = known.get("status") != text
        self._found[kind] = {
            "type": kind.value,
            "status": text,
            "reason": reason.value,
            "message": message if len(message) <= MESSAGE_MAX else message[: MESSAGE_MAX - 1] + "…",
            "lastTransitionTime": rfc3339(self._now) if moved else known["lastTransitionTime"],
        }
        if self._generation is not None:
            self._found[kind]["observedGeneration"] = self._generation

    def holds(self, kind: ConditionType) -> bool:
        """Its status is True."""
        return bool(self._found[kind]["status"] == "True")

    def reason(self, kind: ConditionType) -> str:
        """Its reason."""
        return str(self._found[kind]["reason"])

    def message(self, kind: ConditionType) -> str:
        """Its message."""
        return str(self._found[kind]["message"])

    def written(self) -> list[Json]:
        """In the order of ConditionType; types of others are left alone by not being written."""
        return [self._found[kind] for kind in ConditionType]

    def events(self) -> list[JobEvent]:
        """One for every condition whose status or reason is another than before."""
        found = []
        for kind, now in self._found.items():
            before = self._before.get(kind)
            if before is None and now["status"] != "True" and kind not in _TOLD_AT_FIRST:
                before = now
            changed = before is None or (before["status"], before["reason"]) != (now["status"], now["reason"])
            if changed and now["reason"] not in _SILENT:
                found.append(JobEvent(_event_reason(kind, now), _first_line(now), _warns(kind, now)))
        # A finished job says so twice, as a condition of its own and as its phase; one is enough.
        return list({each.reason: each for each in found}.values())


def _first_line(now: Json) -> str:
    """The sentence; lines of a log that are kept below it are in the status."""
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


def rfc3339(moment: datetime) -> str:
    """A time as the API server writes it: UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
