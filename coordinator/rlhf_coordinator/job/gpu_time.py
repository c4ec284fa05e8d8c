"""The GPU time of a job: seconds of computation by group, and idle seconds by group and cause.

Between two heartbeats of a worker, the reported compute time without device turns is busy, and the rest is idle. Rule:
moments are arguments, in seconds of one monotonic clock.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rlhf_common.names import Group

SEGMENTS: Final = 256
"""Most stored phases."""
_WORK: Final = {
    Group.GENERATION: frozenset({"Starting", "Generating", "Scoring", "Publishing", "Recovering"}),
    Group.INFERENCE: frozenset({"Starting", "Generating", "Scoring", "Publishing", "Recovering"}),
    Group.TRAINING: frozenset({"Starting", "Training", "Publishing", "Checkpointing", "Recovering"}),
}
"""Phases in which a group may have work of its own."""
_CAUSES: Final = {
    "Starting": "starting",
    "Scoring": "inference",
    "Training": "training",
    "Publishing": "weight_update",
    "Checkpointing": "checkpoint",
    "Recovering": "recovering",
}
"""Phase -> cause of idle GPUs in it; the cause in Generating depends on the group and the tail."""


class Segment(NamedTuple):
    """A phase's part of the time between two heartbeats."""

    cause: str
    """Cause to which idle time in it is assigned."""
    seconds: float
    works: bool
    """Whether the worker may have had work in it."""


def attribute(segments: Iterable[Segment], busy: float) -> dict[str, float]:
    """Return cause -> idle seconds. `busy` seconds of computation fill the segments with `works` first."""
    idle: dict[str, float] = {}
    for segment in sorted(segments, key=lambda segment: not segment.works):
        computed = min(busy, segment.seconds)
        busy -= computed
        if segment.seconds > computed:
            idle[segment.cause] = idle.get(segment.cause, 0.0) + segment.seconds - computed
    return idle


def cause_of(phase: str, group: Group, *, tail: bool) -> str:
    """Return why a GPU of a group idles in a phase. `tail`: no sample is queued for decoding, or the phase is over."""
    if phase != "Generating":
        return _CAUSES.get(phase, "no_work")
    if tail:
        return "tail"
    return "no_work" if group is Group.GENERATION else "generation"


@dataclass
class GpuTime:
    """GPU seconds since this process started."""

    busy: dict[Group, float] = field(default_factory=dict)
    idle: dict[tuple[Group, str], float] = field(default_factory=dict)
    """(group, cause) -> seconds."""
    _phases: deque[tuple[float, str]] = field(default_factory=lambda: deque([(0.0, "Starting")], maxlen=SEGMENTS))
    """(when it began, phase), oldest first."""
    _turns: dict[str, float] = field(default_factory=dict)
    """Worker -> seconds of device turns since its last recorded heartbeat; its next one counts them as compute time."""

    def enter(self, phase: str, now: float) -> None:
        """Begin another phase."""
        self._phases.append((now, phase))

    def turned(self, worker: str, seconds: float) -> None:
        """Add seconds in which a device changed between the roles of a worker."""
        self._turns[worker] = self._turns.get(worker, 0.0) + seconds

    def beat(
        self,
        worker: str,
        group: Group,
        since: float,
        now: float,
        computed: float,
        *,
        gpus: int,
        ranks: bool,
        tail: bool,
    ) -> None:
        """Record a heartbeat: between the moments `since` and `now`, a worker computed for `computed` seconds.

        `ranks`: workers of this group also run the training ranks. `tail`: no sample is queued for decoding.
        """
        seconds = max(0.0, now - since)
        computed = min(seconds, max(0.0, computed))
        turned = min(computed, self._turns.pop(worker, 0.0))
        works = _WORK[group] | (_WORK[Group.TRAINING] if ranks else frozenset())
        segments = [
            Segment(cause_of(phase, group, tail=tail or ended), length, phase in works)
            for phase, length, ended in self._between(since, now)
        ]
        for cause, idle in attribute(segments, computed).items():
            self._add_idle(group, cause, gpus * idle)
        if turned:
            self._add_idle(group, "turn", gpus * turned)
        self.busy[group] = self.busy.get(group, 0.0) + gpus * (computed - turned)

    def _add_idle(self, group: Group, cause: str, seconds: float) -> None:
        self.idle[group, cause] = self.idle.get((group, cause), 0.0) + seconds

    def _between(self, since: float, now: float) -> list[tuple[str, float, bool]]:
        """Return (phase, seconds, whether it is over) for the phases between two moments, newest first.

        Time before the oldest stored phase belongs to that phase.
        """
        parts, end = [], now
        for begun, phase in reversed(self._phases):
            start = max(since, begun)
            if end > start:
                parts.append((phase, end - start, end < now))
                end = start
            if begun <= since:
                return parts
        if end > since:
            parts.append((self._phases[0][1], end - since, True))
        return parts
