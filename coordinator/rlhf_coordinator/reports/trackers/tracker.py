"""The interface of a tracker, a destination for the metrics, spans and events of a run.

A tracker must be quick, because the coordinator's loop waits for it. It raises an OSError when it cannot write.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.reports.sample_histories import SampleHistories
from rlhf_coordinator.reports.sample_table import SampleRow
from rlhf_planner.explain.iteration_profile import IterationProfile


class Tracker:
    """One kind of report. Its methods do nothing by default; a kind overrides those that it needs."""

    def iteration(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Record a finished iteration. After a restart an iteration may be repeated, and must not be recorded twice."""

    def evaluation(self, version: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Record the evaluation of the job's last version, with which no iteration begins.

        It may be repeated after a restart.
        """

    def span(self, span: pb.Span) -> None:
        """Record a span."""

    def event(self, time_ns: int, kind: str, message: str, attributes: Mapping[str, str]) -> None:
        """Record an event, for example a lost worker, a saved checkpoint, a failed score."""

    def samples(self, iteration: int, rows: Sequence[SampleRow]) -> None:
        """Record the sample table of an iteration, which may be repeated after a restart."""

    def facts(self, facts: IterationProfile) -> None:
        """Record the time profile of an iteration, which may be repeated after a restart."""

    def histories(self, histories: SampleHistories) -> None:
        """Record the sample histories of an iteration, which may be repeated after a restart."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Complete the output at the end of the run. `summary`: facts about the whole run by name."""
