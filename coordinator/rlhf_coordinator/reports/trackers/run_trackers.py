"""All trackers of one run, and what it means when one of them fails.

Rule: an iteration that a required tracker cannot record ends the job with exit code 23. Whatever else cannot be written
is given up with one log line, and the job goes on; a job that is over keeps its outcome, whatever the disk says. When
the process dies, what the next one does again is recorded again, and no iteration is there twice.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from rlhf_api import control_pb2 as pb
from rlhf_coordinator.failures import storage_error
from rlhf_coordinator.reports.trackers.registry import TRACKERS
from rlhf_coordinator.reports.trackers.tracker import Tracker

log = logging.getLogger(__name__)

FIELD: Final = "RLHF_RUN_DIR"


class RunTrackers:
    """Gives everything to every tracker. Not thread-safe: the coordinator's loop is its only caller."""

    def __init__(
        self,
        run_dir: Path,
        trackers: Mapping[str, Tracker],
        required: Collection[str] = (),
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """`required`: names of trackers without which the job does not go on. `clock`: nanoseconds since the epoch."""
        self._run_dir = run_dir
        self._trackers = dict(trackers)
        self._required = frozenset(required)
        self._clock = clock
        self._finished = False

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Record a finished iteration. Raises JobError (exit code 23) when a required tracker cannot."""
        now = self._clock()
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.iteration(iteration, now, metrics)
            except OSError as error:
                if name in self._required:
                    raise storage_error("metrics", self._run_dir, error, FIELD) from error
                self._give_up(name, error)

    def span(self, span: pb.Span) -> None:
        """Record something that took time; what comes after the end of the run is left out."""
        for name, tracker in list(self._trackers.items()) if not self._finished else ():
            try:
                tracker.span(span)
            except OSError as error:
                self._give_up(name, error)

    def event(self, time_ns: int, kind: str, message: str, **attributes: str) -> None:
        """Record something that happened; what comes after the end of the run is left out."""
        for name, tracker in list(self._trackers.items()) if not self._finished else ():
            try:
                tracker.event(time_ns, kind, message, attributes)
            except OSError as error:
                self._give_up(name, error)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Complete every tracker: the run is over."""
        self._finished = True
        for name, tracker in self._trackers.items():
            try:
                tracker.finish(summary)
            except (OSError, ValueError) as error:
                log.error("%s cannot be completed: %s", name, error)

    def _give_up(self, name: str, error: OSError) -> None:
        log.error("%s is not written from now on: %s", name, error)
        del self._trackers[name]


def open_trackers(run_dir: Path, next_iteration: int, clock: Callable[[], int] = time.time_ns) -> RunTrackers:
    """Open every registered tracker of a run folder. Raises JobError (exit code 23) when a required one cannot be.

    `next_iteration`: the first that will be recorded; what the folder holds of later ones is forgotten.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    trackers: dict[str, Tracker] = {}
    for name, kind in TRACKERS.items():
        try:
            trackers[name] = kind.open(run_dir, next_iteration)
        except OSError as error:
            if kind.required:
                raise storage_error(name, run_dir, error, FIELD) from error
            log.warning("%s is not written: %s", name, error)
    return RunTrackers(run_dir, trackers, [name for name, kind in TRACKERS.items() if kind.required], clock)
