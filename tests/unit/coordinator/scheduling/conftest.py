"""The fixtures of the scheduler's tests."""

from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import make_job

from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.job_state import JobContext, job_context


@pytest.fixture
def context(tmp_path: Path) -> JobContext:
    """Return the context of a job with 8 samples per iteration."""
    job = make_job(tmp_path, batch=8)
    return job_context(job, schedule_json(job.spec))
