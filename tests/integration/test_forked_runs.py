"""What a forked `rlhf run` shares with one that a shell starts: how it ends, and what it says (that it trains the same
weights: `test_kills`)."""

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import forked_runs
from tests.support.chaos import processes
from tests.support.forked_runs import ForkedRun, start_run
from tests.support.local_job import write_job
from tests.support.processes_left import alive, until

from rlhf_api.names import ExitCode

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def own_server() -> Iterator[None]:
    """Fork of a process of this environment: libraries that tests before these imported may have added to it."""
    servers: list[forked_runs.RunServerClient] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forked_runs, "_servers", servers)
        yield
    for server in servers:
        server.close()


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


def test_one_of_another_environment_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(start_run(["--help"], tmp_path / "forked.out", executed=False), ForkedRun)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = start_run(["--help"], tmp_path / "executed.out", executed=False)
    assert isinstance(run, subprocess.Popen)
    assert run.wait(60) == 0


def test_one_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    options = ["--run-dir", str(tmp_path / "run"), "--plain"]
    run = start_run(["run", str(write_job(tmp_path, iterations=1000)), *options], tmp_path / "out", executed=False)
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
