"""The tutorials' examples run as described: jobs of real processes with the code that a reader writes."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import run_job
from tests.support.jobs.local_job import write_job

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.timeout(1800)
def test_a_job_decodes_with_the_engine_of_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_job(tmp_path, iterations=2, batch=8, algorithm="grpo")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    run = run_job(manifest, tmp_path / "run", settings=("generation.engine=your_engine.plain_engine",))
    assert len(run.lines) == 2
