"""What a tracker is: somewhere that the metrics, spans and events of a run go.

Rule: a tracker is never needed to go on, the journal is; it must be quick, as the coordinator's loop waits for it. It
belongs to one process: a restart opens it anew with the first iteration that this process will record. It raises an
OSError when it cannot write; `RunTrackers` says what follows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.reports.sample_histories import SampleHistories
from rlhf_coordinator.reports.sample_table import SampleRow
from rlhf_planner.explain.iteration_profile import IterationProfile


class Tracker:
    """One kind of report. What a kind does not keep it inherits: nothing is done."""

    def iteration(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Record a finished iteration; one that it has is given again after a restart, and must not be there twice."""

    def evaluation(self, version: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Record the evaluation of the job's last version, with which no iteration begins; one that it has may be given
        again after a restart. All others are among the metrics of the iteration of their number."""

    def span(self, span: pb.Span) -> None:
        """Record something that took time."""

    def event(self, time_ns: int, kind: str, message: str, attributes: Mapping[str, str]) -> None:
        """Record something that happened: a worker lost, a checkpoint made, a score retried."""

    def samples(self, iteration: int, rows: Sequence[SampleRow]) -> None:
        """Record the sample table of an iteration; given again after a restart, it replaces the one before."""

    def facts(self, facts: IterationProfile) -> None:
        """Record what is known of where the time of an iteration went; given again after a restart, they replace
        those before."""

    def histories(self, histories: SampleHistories) -> None:
        """Record what happened to each sample of an iteration; given again after a restart, they replace those
        before."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Complete what was written: the run is over, and nothing comes afterwards. `summary`: facts about the whole
        run by name."""
