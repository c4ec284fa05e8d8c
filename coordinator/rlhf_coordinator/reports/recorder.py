"""Writes a run folder's reports while a job runs: what the coordinator's Recorder protocol asks for.

Rule: metrics.jsonl and summary.json are the record of a run, so an error there is the caller's (OSError, disk full).
Timeline and TensorBoard are views: when one of them cannot be written it is given up with one log line, and the job
goes on. When the process dies, what the next one does again is written again and nothing is there twice.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rlhf_api import control_pb2 as pb
from rlhf_coordinator.reports import events, metrics, summary, timeline

log = logging.getLogger(__name__)

EVENTS_FILE: Final = "events.jsonl"
"""What happened besides iterations: workers lost and back, checkpoints, retries."""
FLUSH_SECONDS: Final = 1.0
"""A live reader sees spans after this long; flushing each would cost a system call a span."""


class RunRecorder:
    """Reports of one run folder. Not thread-safe: the coordinator's loop is its only caller."""

    def __init__(self, run_dir: Path, next_iteration: int, clock: Callable[[], int] = time.time_ns) -> None:
        """`next_iteration`: the first that will be recorded; later ones in the folder are forgotten. Raises OSError."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._clock = clock
        self._flushed = 0
        self._finished = False
        self._metrics = metrics.MetricsFile(run_dir / metrics.FILE, next_iteration)
        self._events = (run_dir / EVENTS_FILE).open("a", encoding="utf-8")
        self._scalars: events.EventsFile | None = events.EventsFile(run_dir / events.FOLDER, next_iteration)
        self._timeline: timeline.TimelineFile | None = None
        try:
            self._timeline = timeline.TimelineFile(run_dir / timeline.FILE)
        except OSError as error:
            log.warning("no timeline is written: %s", error)

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """An iteration is over. Raises OSError."""
        now = self._clock()
        is_new = self._metrics.append(iteration, now, metrics)
        if self._scalars is not None and is_new:
            try:
                self._scalars.scalars(iteration, now, metrics)
            except OSError as error:
                log.warning("no TensorBoard events are written from now on: %s", error)
                self._scalars = None
        self._flush(now, force=True)

    def span(self, span: pb.Span) -> None:
        """Something a worker did; what comes after the end of the run is left out."""
        if self._timeline is None or self._finished:
            return
        try:
            self._timeline.span(
                span.worker, span.name, span.start_ns, span.end_ns, span.iteration, dict(span.attributes)
            )
            self._flush(self._clock())
        except OSError as error:
            self._give_up_timeline(error)

    def event(self, time_ns: int, kind: str, message: str, **attributes: Any) -> None:
        """Something that happened, in words; what comes after the end of the run is left out. Raises OSError."""
        if self._finished:
            return
        self._events.write(json.dumps({"time_ns": time_ns, "kind": kind, "message": message, **attributes}) + "\n")
        self._events.flush()
        if self._timeline is not None:
            try:
                self._timeline.instant(time_ns, kind, {"message": message, **attributes})
            except OSError as error:
                self._give_up_timeline(error)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run is over: writes summary.json and completes the files. Raises OSError."""
        self._finished = True
        self._metrics.close()
        lines = metrics.read_metrics(self._run_dir / metrics.FILE)
        _write_summary(self._run_dir, lines, summary)
        self._events.close()
        for view in (self._scalars, self._timeline):
            if view is not None:
                try:
                    view.close()
                except OSError as error:
                    log.warning("a report could not be completed: %s", error)

    def _flush(self, now: int, *, force: bool = False) -> None:
        if self._timeline is None or not (force or now - self._flushed > FLUSH_SECONDS * 1e9):
            return
        self._flushed = now
        try:
            self._timeline.flush()
        except OSError as error:
            self._give_up_timeline(error)

    def _give_up_timeline(self, error: OSError) -> None:
        log.warning("no timeline is written from now on: %s", error)
        self._timeline = None


def _write_summary(run_dir: Path, lines: list[metrics.Line], given: Mapping[str, Any]) -> None:
    summary.write_summary(run_dir, summary.summarise(lines, given))
