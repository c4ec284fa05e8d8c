"""A coordinator's parts without its process: no sockets, no server, reports that are kept nowhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.coordinated import make_prompts

from rlhf_api import control_pb2 as pb
from rlhf_api.job import RLHFJob
from rlhf_coordinator.job.job_run import JobRun, begin_run
from rlhf_coordinator.scheduling.schedule import schedule_json
from rlhf_coordinator.state.job_state import job_context
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.restore import Restored, restore


class SilentRecorder:
    """A recorder that keeps the spans in memory and drops the rest."""

    def __init__(self) -> None:
        self.spans: list[pb.Span] = []

    def iteration(self, iteration: int, metrics: Mapping[str, float]) -> None: ...

    def span(self, span: pb.Span) -> None:
        self.spans.append(span)

    def event(self, time_ns: int, kind: str, message: str, **attributes: str) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


def begin_in_process(folder: Path, job: RLHFJob, recorder: SilentRecorder | None = None) -> tuple[JobRun, Restored]:
    """Return the running job that goes on from the journal in this folder, and what was restored."""
    context = job_context(job, schedule_json(job.spec))
    journal = Journal(folder / "run" / "journal")
    restored = restore(context, journal, "prompts", 0, resume=False)
    return begin_run(context, restored, journal, make_prompts(job), recorder or SilentRecorder()), restored
