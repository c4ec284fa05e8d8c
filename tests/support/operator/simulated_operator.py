"""The event handling of an operator without the operator: a test delivers events and reads the index."""

from typing import Any

from tests.support.operator.recording_queue import RecordingQueue

from rlhf_operator.index import Index
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.watch_events import WatchEventHandler, unreadable_reporter

KEY = "team/job"
"""Key of the job of `simulated_cluster`."""


class SimulatedOperator:
    """The event handler with its index and queue."""

    def __init__(self) -> None:
        self.metrics = OperatorMetrics()
        self.index, self.queue = Index(unreadable_reporter(self.metrics)), RecordingQueue()
        self.events = WatchEventHandler(self.index, self.queue, self.metrics)  # type: ignore[arg-type]

    def sees(self, kind: str, body: Any, event: str | None = "MODIFIED") -> None:
        """Deliver an event."""
        self.events.take(kind, {"type": event, "object": body})

    def counted(self, kind: str) -> float:
        """Return the number of unreadable objects of a kind."""
        return self.metrics.registry.get_sample_value("rlhf_operator_unreadable_objects_total", {"kind": kind}) or 0.0
