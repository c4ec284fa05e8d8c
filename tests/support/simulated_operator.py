"""The intake of an operator without the operator: events go in, and what is remembered of them can be asked for."""

from typing import Any

from tests.support.queued_cluster import EVERY_API

from rlhf_operator.handlers import WATCHED, Intake, telling
from rlhf_operator.index import Index
from rlhf_operator.operator_metrics import OperatorMetrics

KEY = "team/job"
"""Of the job of `simulated_cluster`."""


class EnqueuedKeys:
    """A work queue that keeps what it is given."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def add(self, key: str) -> None:
        self.keys.append(key)


class SimulatedOperator:
    """The intake of an operator, without the operator."""

    def __init__(self) -> None:
        self.metrics = OperatorMetrics()
        self.index, self.queue = Index(telling(self.metrics)), EnqueuedKeys()
        watched = {**WATCHED, **EVERY_API.watched()}
        self.intake = Intake(self.index, self.queue, self.metrics, watched)  # type: ignore[arg-type]

    def sees(self, kind: str, body: Any, event: str = "MODIFIED") -> None:
        self.intake.take(kind, {"type": event, "object": body})

    def counted(self, kind: str) -> float:
        return self.metrics.registry.get_sample_value("rlhf_operator_unreadable_objects_total", {"kind": kind}) or 0.0
