"""A client that watches a job sees its end, at any time."""

from pathlib import Path
from typing import Any, cast

from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobOutcome
from rlhf_coordinator.loop.event_handlers import EventHandlers
from rlhf_coordinator.service.server import CoordinatorService
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver


async def test_a_job_that_ends_while_a_status_is_sent_is_seen_to_end(tmp_path: Path) -> None:
    run, _ = begin_in_process(tmp_path, make_job(tmp_path))
    service = CoordinatorService(run, EventHandlers(run, CheckpointSaver(run)))
    phases = []
    async for status in service.WatchStatus(pb.WatchStatusRequest(max_rate_hz=20), cast(Any, None)):
        phases.append(status.phase)
        if run.outcome is None:
            run.outcome = JobOutcome("Complete")
            run.over.set()
    assert phases == ["Starting", "Complete"]
