"""The parts of a coordinator without its process: no sockets, no server, reports in memory."""

from pathlib import Path

from tests.support.coordinator.coordinated import make_prompts

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.loop.recovery import restore_run
from rlhf_coordinator.reports.trackers.run_trackers import RunTrackers
from rlhf_coordinator.reports.trackers.tracker import Tracker
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.job_state import job_context
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.restore import Restored


class SpansInMemory(Tracker):
    """Stores spans and ignores all else."""

    def __init__(self) -> None:
        self.spans: list[pb.Span] = []

    def span(self, span: pb.Span) -> None:
        self.spans.append(span)


def begin_in_process(
    folder: Path, job: RLHFJob, tracker: Tracker | None = None, *, prompts_sha256: str = "prompts"
) -> tuple[JobRun, Restored]:
    """Return the running job that resumes from the journal in this folder, or from its checkpoints, and what was
    restored."""
    context = job_context(job, schedule_json(job.spec))
    journal = Journal(folder / "run" / "journal")
    trackers = RunTrackers(folder, {"memory": tracker or SpansInMemory()})
    return restore_run(context, journal, make_prompts(job), prompts_sha256, folder, resume=True, trackers=trackers)
