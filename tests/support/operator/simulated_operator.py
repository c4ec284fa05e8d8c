"""An operator's handling of events without the operator: events go in, and what is remembered can be asked for."""

from typing import Any

from tests.support.operator.recording_queue import RecordingQueue

from rlhf_operator.index import Index
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.watch_events import WatchEventHandler, unreadable_reporter

KEY = "team/job"
"""Of the job of `simulated_cluster`."""


class SimulatedOperator:
    """The handling of events, and an index and a queue that it fills."""

    def __init__(self) -> None:
        self.metrics = OperatorMetrics()
        self.index, self.queue = Index(unreadable_reporter(self.metrics)), RecordingQueue()
        self.events = WatchEventHandler(self.index, self.queue, self.metrics)  # type: ignore[arg-type]

    def sees(self, kind: str, body: Any, event: str | None = "MODIFIED") -> None:
        """Take an event."""
        self.events.take(kind, {"type": event, "object": body})

    def counted(self, kind: str) -> float:
        """Return how many objects of a kind could not be read."""
        return self.metrics.registry.get_sample_value("rlhf_operator_unreadable_objects_total", {"kind": kind}) or 0.0
