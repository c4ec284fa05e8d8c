"""The trackers of a run that write into its folder, by the name of their output.

To add one, write a module in this folder, and add a line here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from rlhf_coordinator.reports.trackers.events_log import EventsLog
from rlhf_coordinator.reports.trackers.facts_jsonl import FactsJsonl
from rlhf_coordinator.reports.trackers.histories_jsonl import HistoriesJsonl
from rlhf_coordinator.reports.trackers.metrics_jsonl import MetricsJsonl
from rlhf_coordinator.reports.trackers.sample_tables import SampleTables
from rlhf_coordinator.reports.trackers.summary_json import SummaryJson
from rlhf_coordinator.reports.trackers.tensorboard_events import TensorBoardEvents
from rlhf_coordinator.reports.trackers.timeline_json import TimelineJson
from rlhf_coordinator.reports.trackers.tracker import Tracker


@dataclass(frozen=True)
class TrackerKind:
    """How to open a tracker, and whether the job needs it."""

    open: Callable[[Path, int], Tracker]
    """Function of (run folder, first iteration that this process will record).

    Raises OSError, and ModuleNotFoundError when the library that it needs is missing.
    """
    required: bool = False
    """Whether the job fails if it cannot open the tracker, or cannot record an iteration or an evaluation in it."""


TRACKERS: Final[Mapping[str, TrackerKind]] = MappingProxyType(
    {
        "metrics.jsonl": TrackerKind(MetricsJsonl, required=True),
        "events.jsonl": TrackerKind(EventsLog, required=True),
        "facts.jsonl": TrackerKind(FactsJsonl),
        "sample-histories.jsonl": TrackerKind(HistoriesJsonl),
        "samples": TrackerKind(SampleTables),
        "tensorboard": TrackerKind(TensorBoardEvents),
        "timeline.json": TrackerKind(TimelineJson),
        "summary.json": TrackerKind(SummaryJson, required=True),
    }
)
"""Name -> tracker, in the order in which they are opened and get data."""
