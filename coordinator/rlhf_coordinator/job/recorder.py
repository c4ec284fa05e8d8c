"""What the coordinator tells the reports of a run; `rlhf_coordinator.reports.recorder.RunRecorder` writes the files."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rlhf_api import control_pb2 as pb
from rlhf_coordinator.failures import storage_error

log = logging.getLogger(__name__)


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


class GuardedRecorder:
    """A recorder whose errors have one meaning: metrics that cannot be written are a storage failure of the job (exit
    code 23); the account of what happened is given up with one log line."""

    def __init__(self, recorder: Recorder, folder: Path) -> None:
        self._recorder = recorder
        self._folder = folder
        self._quiet = False

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Raises JobError."""
        try:
            self._recorder.iteration(iteration, metrics)
        except OSError as error:
            raise storage_error("metrics", self._folder, error, "RLHF_RUN_DIR") from error

    def span(self, span: pb.Span) -> None:
        """Views never fail."""
        self._recorder.span(span)

    def event(self, time_ns: int, kind: str, message: str, **attributes: str) -> None:
        """Logs the first error and says no more."""
        if self._quiet:
            return
        try:
            self._recorder.event(time_ns, kind, message, **attributes)
        except OSError as error:
            self._quiet = True
            log.error("events are not written from now on: %s", error)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """A job that has ended ends as it did, whatever the disk says."""
        try:
            self._recorder.finish(summary)
        except (OSError, ValueError) as error:
            log.error("the summary cannot be written: %s", error)
