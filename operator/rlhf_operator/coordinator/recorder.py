"""What the coordinator tells the reports of a run; `rlhf_operator.reports.recorder.RunRecorder` writes the files."""

from collections.abc import Mapping
from typing import Any, Protocol

from rlhf_api import control_pb2 as pb


class Recorder(Protocol):
    """Takes measurements; must be quick, and must never be needed to go on: the journal is."""

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """One finished iteration; given again after a restart for the last one."""

    def span(self, span: pb.Span) -> None:
        """Something that took time."""

    def event(self, time_ns: int, kind: str, message: str, **attributes: str) -> None:
        """Something that happened: a worker lost, a checkpoint made, a score retried."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The job ended."""
