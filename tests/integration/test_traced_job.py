"""A real local job whose processes log JSON: every line is one, and says job, worker and iteration."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.chaos import Ended, run_job
from tests.support.local_job import PROCESSES, write_job

pytestmark = [pytest.mark.slow]

ITERATIONS = 2


def lines_of(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Worker -> lines of its log, each of which is one JSON object."""
    logs = {name: run_dir / "logs" / f"{name}.log" for name in PROCESSES}
    return {name: [json.loads(line) for line in path.read_text().splitlines()] for name, path in logs.items()}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    folder = tmp_path_factory.mktemp("traced")
    manifest = write_job(folder, algorithm="grpo", iterations=ITERATIONS, batch=8, responses=8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RLHF_LOG_FORMAT", "json")
        return run_job(manifest, folder / "run"), folder / "run"


def test_every_line_of_every_process_says_whose_it_is(job: tuple[Ended, Path]) -> None:
    ended, run_dir = job
    assert ended.code == 0, ended.output[-3000:]
    for name, lines in lines_of(run_dir).items():
        assert lines[0]["message"] == f"start 1 of {name}"
        assert {line["worker"] for line in lines} == {name}
        assert {line["job"] for line in lines[-2:]} == {"default/tiny"}, "the job is known by the end"
        named = [line["iteration"] for line in lines if "iteration" in line]
        assert named == sorted(named)
        assert set(named) <= set(range(ITERATIONS))
    coordinator = lines_of(run_dir)["coordinator"]
    assert {line["iteration"] for line in coordinator if "iteration" in line} == set(range(ITERATIONS))
