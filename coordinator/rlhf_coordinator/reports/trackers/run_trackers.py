"""The trackers of one run, and the handling of their failures.

If a required tracker cannot record an iteration or an evaluation, a JobError (exit code 23) is raised. After another
OSError the tracker is given up.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError, storage_error
from rlhf_coordinator.reports.sample_histories import SampleHistories
from rlhf_coordinator.reports.sample_table import SampleRow
from rlhf_coordinator.reports.trackers.opentelemetry_traces import OpenTelemetryTraces
from rlhf_coordinator.reports.trackers.registry import TRACKERS
from rlhf_coordinator.reports.trackers.service_tracker import ServiceTracker
from rlhf_coordinator.reports.trackers.services import Settings
from rlhf_coordinator.reports.trackers.tracker import Tracker
from rlhf_planner.explain.iteration_profile import IterationProfile

log = logging.getLogger(__name__)

FIELD: Final = "RLHF_RUN_DIR"
TRACES: Final = "opentelemetry"
"""Name of the tracker of traces."""


class RunTrackers:
    """Passes data to every tracker that is not given up."""

    def __init__(
        self,
        run_dir: Path,
        trackers: Mapping[str, Tracker],
        required: Collection[str] = (),
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """`required`: names of trackers that the job needs. `clock`: nanoseconds since the epoch."""
        self._run_dir = run_dir
        self._trackers = dict(trackers)
        self._required = frozenset(required)
        self._clock = clock
        self._finished = False
        traces = self._trackers.get(TRACES)
        self._traces = traces if isinstance(traces, OpenTelemetryTraces) else None
        self.trace_run = self._traces.run if self._traces else ""
        """Random name of the run, from which ids of traces derive; empty without traces."""
        self.lost: tuple[str, ...] = ()
        """Descriptions of trackers that were given up, and of services that could not be opened; replaced as a
        whole."""

    def backlog(self) -> dict[str, int]:
        """Return kind of each service that is not given up -> number of messages that it has not answered yet."""
        return {name: each.backlog for name, each in list(self._trackers.items()) if isinstance(each, ServiceTracker)}

    def trace_spans(self) -> dict[str, int]:
        """Return outcome -> number of spans; empty for a run without traces."""
        return self._traces.counts() if self._traces else {}

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Record a finished iteration. Raises JobError (exit code 23) when a required tracker cannot."""
        self._record(lambda tracker, now: tracker.iteration(iteration, now, metrics))

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Record the evaluation of the job's last version. Raises JobError as `iteration` does."""
        self._record(lambda tracker, now: tracker.evaluation(version, now, metrics))

    def _record(self, give: Callable[[Tracker, int], None]) -> None:
        now = self._clock()
        for name, tracker in list(self._trackers.items()):
            try:
                give(tracker, now)
            except OSError as error:
                if name in self._required:
                    raise storage_error("metrics", self._run_dir, error, FIELD) from error
                self._give_up(name, error)

    def span(self, span: pb.Span) -> None:
        """Record a span; spans after the end of the run are ignored."""
        for name, tracker in list(self._trackers.items()) if not self._finished else ():
            try:
                tracker.span(span)
            except OSError as error:
                self._give_up(name, error)

    def event(self, time_ns: int, kind: str, message: str, **attributes: str) -> None:
        """Record an event; events after the end of the run are ignored."""
        for name, tracker in list(self._trackers.items()) if not self._finished else ():
            try:
                tracker.event(time_ns, kind, message, attributes)
            except OSError as error:
                self._give_up(name, error)

    def samples(self, iteration: int, rows: Sequence[SampleRow]) -> None:
        """Record the sample table of an iteration."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.samples(iteration, rows)
            except OSError as error:
                self._give_up(name, error)

    def facts(self, facts: IterationProfile) -> None:
        """Record the time profile of an iteration."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.facts(facts)
            except OSError as error:
                self._give_up(name, error)

    def histories(self, histories: SampleHistories) -> None:
        """Record the history of each sample of an iteration."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.histories(histories)
            except OSError as error:
                self._give_up(name, error)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Complete every tracker at the end of the run; log errors."""
        self._finished = True
        for name, tracker in self._trackers.items():
            try:
                tracker.finish(summary)
            except (OSError, ValueError) as error:
                log.error("%s cannot be completed: %s", name, error)

    def _give_up(self, name: str, error: OSError) -> None:
        del self._trackers[name]
        self.lose(name, error)

    def lose(self, name: str, error: OSError) -> None:
        """Report that a tracker is unavailable from now on."""
        message = f"{name} is not written from now on: {error}"
        log.error(message)
        self.lost = (*self.lost, message)
        self.event(self._clock(), "tracker-lost", message, tracker=name)


def open_trackers(
    run_dir: Path,
    next_iteration: int,
    clock: Callable[[], int] = time.time_ns,
    services: Mapping[str, Settings] | None = None,
    traces: OpenTelemetryTraces | None = None,
) -> RunTrackers:
    """Open the registered trackers of a run folder, and the services by kind; `traces` is already open.

    Raises JobError when a required tracker cannot be opened (exit code 23), or when the library of a service is
    missing.
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
        except ModuleNotFoundError as error:
            if kind.required:
                raise
            log.warning("%s is not written: %s", name, error)
    failed: dict[str, OSError] = {}
    for service, settings in (services or {}).items():
        try:
            trackers[service] = ServiceTracker(service, run_dir, next_iteration, settings)
        except ModuleNotFoundError as error:
            field = f"spec.trackers.{service}"
            message = f"{field}: {error}, in the coordinator's image, or remove {field}"
            raise JobError("TrackerMissing", message, field=field, exit_code=ExitCode.USAGE) from error
        except OSError as error:
            failed[service] = error
    if traces is not None:
        trackers[TRACES] = traces
    opened = RunTrackers(run_dir, trackers, [name for name, kind in TRACKERS.items() if kind.required], clock)
    for service, why in failed.items():
        opened.lose(service, why)
    return opened
