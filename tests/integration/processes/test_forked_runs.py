"""A forked `rlhf run` ends and prints like one that a shell starts (`test_kills` covers equal weights)."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.support.jobs.chaos import processes
from tests.support.jobs.forked_runs import ForkedRun, start_run
from tests.support.jobs.local_job import write_job
from tests.support.jobs.processes_left import alive, until

from rlhf_common.names import ExitCode

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a job that would run for long; return its manifest.

    Writing it imports libraries that may add to the environment, as earlier tests may. In a new environment the second
    run is the first that is forked.
    """
    folder = tmp_path_factory.mktemp("job")
    manifest = write_job(folder, iterations=1000)
    assert start_run(["--help"], folder / "out", executed=False).wait(60) == 0
    return manifest


@pytest.mark.parametrize(
    ("arguments", "code"), [(["run", "nothing.yaml"], ExitCode.USAGE), (["walk"], ExitCode.USAGE), (["--help"], 0)]
)
def test_it_ends_and_says_what_an_executed_one_does(arguments: list[str], code: int, tmp_path: Path) -> None:
    said = []
    for executed in (False, True):
        log = tmp_path / f"{executed}.out"
        run = start_run(arguments, log, executed=executed)
        assert isinstance(run, ForkedRun) is not executed
        assert run.wait(60) == code
        assert run.poll() == code
        said.append(log.read_text())
    assert said[0] == said[1] != ""


def test_what_is_added_to_the_environment_reaches_runs_which_are_forked_from_the_second_on(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(name: str) -> "subprocess.Popen[bytes] | ForkedRun":
        options = ["--run-dir", str(tmp_path / name), "--plain"]
        run = start_run(["run", str(job), *options], tmp_path / "out", executed=False)
        inherited = Path(f"/proc/{run.pid}/environ")
        until(lambda: bool(inherited.read_bytes()))  # it is empty for a moment while a program is executed
        assert (b"ADDED_BETWEEN_RUNS=1" in inherited.read_bytes().split(b"\0")) is ("ADDED_BETWEEN_RUNS" in os.environ)
        run.kill()
        run.wait(60)
        return run

    assert isinstance(begun("before"), ForkedRun)
    monkeypatch.setenv("ADDED_BETWEEN_RUNS", "1")
    assert isinstance(begun("first"), subprocess.Popen)
    assert isinstance(begun("second"), ForkedRun)
    assert isinstance(begun("third"), ForkedRun)
    monkeypatch.undo()
    assert isinstance(begun("after"), ForkedRun), "that of before is still forked of"


def test_one_that_is_killed_leaves_no_process(job: Path, tmp_path: Path) -> None:
    options = ["--run-dir", str(tmp_path / "run"), "--plain"]
    run = start_run(["run", str(job), *options], tmp_path / "out", executed=False)
    found: dict[str, int] = {}
    deadline = time.monotonic() + 60
    while len(found) < 6:
        assert run.poll() is None, (tmp_path / "out").read_text()
        assert time.monotonic() < deadline, found
        found = processes(run.pid)
        time.sleep(0.02)
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(0.01)
    run.kill()
    assert run.wait(60) == -signal.SIGKILL
    until(lambda: not any(alive(pid) for pid in found.values()))
