"""The local supervisor with real, small processes: they restart, they stop, and none is left behind."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.support.jobs.local_processes import EXITS, FOREVER, STOPS, process

from rlhf_cli.local import leftover_processes
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.job_supervisor import JobSupervisor, LocalRunResult, Notice
from rlhf_cli.local.pods_to_processes import LocalProcess
from rlhf_cli.local.ports import claim, free_ports
from rlhf_common.names import Group

ROOT = Path(__file__).parents[3]


class Running:
    """A supervisor in the background of a test."""

    def __init__(self, processes: list[LocalProcess], backoff_limit: int = 3) -> None:
        self.processes = processes
        self.token = uuid.uuid4().hex
        self.events: list[Notice] = []
        self.supervisor = JobSupervisor(processes, backoff_limit, self.token, self.events.append, leave_seconds=0.2)
        self.task = asyncio.create_task(self.supervisor.run())

    async def outcome(self) -> LocalRunResult:
        outcome = await asyncio.wait_for(self.task, 120)
        assert leftover_processes.find_processes(self.token) == []
        return outcome

    async def started(self, *names: str, other_than: int = 0) -> dict[str, int]:
        """Return process ids once all of these run (and the first is not `other_than`)."""
        await until(lambda: all(name in self.supervisor.children for name in names))
        await until(lambda: self.supervisor.children.get(names[0], other_than) != other_than)
        return dict(self.supervisor.children)

    async def stopped(self) -> LocalRunResult:
        """Stop the job once its coordinator is ready for that, and wait for the end."""
        (coordinator,) = (p for p in self.processes if p.group is Group.COORDINATOR)
        await until(lambda: coordinator.log.exists() and coordinator.log.read_text().endswith("ready\n"))
        self.supervisor.stop()
        return await self.outcome()


async def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        await asyncio.sleep(0.02)


async def test_the_job_ends_with_the_coordinator_and_takes_the_others_along(tmp_path: Path) -> None:
    running = Running(
        [
            process(tmp_path, "coordinator", EXITS.format(seconds=0.5, code=0)),
            process(tmp_path, "generation-0", FOREVER),
            process(tmp_path, "training-0", EXITS.format(seconds=0, code=0)),
        ]
    )
    outcome = await running.outcome()
    assert outcome.code == 0
    assert outcome.restarts == {"coordinator": 0, "generation-0": 0, "training-0": 0}


@pytest.mark.parametrize("victim", ["coordinator", "generation-0"])
async def test_a_killed_process_comes_back(tmp_path: Path, victim: str) -> None:
    running = Running([process(tmp_path, "coordinator", STOPS), process(tmp_path, "generation-0", FOREVER)])
    first = (await running.started(victim))[victim]
    os.kill(first, signal.SIGKILL)
    await running.started(victim, "coordinator", other_than=first)
    outcome = await running.stopped()
    assert outcome.code == 0
    assert outcome.restarts[victim] == 1
    assert "signal 9" in running.events[0].message
    assert (tmp_path / "logs" / f"{victim}.log").read_text().count("--- ") == 2


async def test_a_crash_loop_ends_the_job_and_says_why(tmp_path: Path) -> None:
    crash = "import sys; sys.exit('CUDA error: out of memory')"
    running = Running([process(tmp_path, "coordinator", STOPS), process(tmp_path, "inference-0", crash)], 2)
    outcome = await running.outcome()
    assert outcome.code == 1
    assert outcome.restarts["inference-0"] == 2
    assert "all 2 restarts of spec.runPolicy.backoffLimit" in outcome.reason
    assert outcome.reason.endswith("CUDA error: out of memory")


async def test_a_requested_restart_is_free(tmp_path: Path) -> None:
    thrice = (
        "import pathlib, time\np = pathlib.Path('count')\nn = int(p.read_text()) if p.exists() else 0\n"
        "p.write_text(str(n + 1))\nif n < 3: raise SystemExit(75)\nwhile True: time.sleep(0.05)"
    )
    running = Running([process(tmp_path, "coordinator", STOPS), process(tmp_path, "training-0", thrice)], 0)
    await until(lambda: len(running.events) == 3)
    await running.started("training-0", "coordinator")
    outcome = await running.stopped()
    assert (outcome.code, outcome.restarts["training-0"]) == (0, 3)


@pytest.mark.parametrize("code", [2, 20, 21, 22, 23, 24])
async def test_a_verdict_of_the_coordinator_is_final(tmp_path: Path, code: int) -> None:
    running = Running([process(tmp_path, "coordinator", EXITS.format(seconds=0, code=code))])
    outcome = await running.outcome()
    assert (outcome.code, outcome.restarts) == (code, {"coordinator": 0})


async def test_children_of_a_killed_worker_go_with_it(tmp_path: Path) -> None:
    child = f"[sys.executable, '-c', {FOREVER!r}]"
    forks = f"import subprocess, sys\nsubprocess.Popen({child})\n{FOREVER}"
    escapes = f"import subprocess, sys\nsubprocess.Popen({child}, start_new_session=True)\n{FOREVER}"
    running = Running(
        [
            process(tmp_path, "coordinator", STOPS),
            process(tmp_path, "inference-0", forks),
            process(tmp_path, "inference-1", escapes),
        ]
    )
    await running.started("coordinator", "inference-0", "inference-1")
    await until(lambda: len(leftover_processes.find_processes(running.token)) == 5)
    running.supervisor.kill()
    assert (await running.outcome()).code == 130


async def test_cores_are_pinned_and_the_environment_is_given(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    prints = "import os; print(os.sched_getaffinity(0), flush=True)\n" + FOREVER
    running = Running(
        [process(tmp_path, "coordinator", STOPS), process(tmp_path, "generation-0", prints, frozenset({core}))]
    )
    log = tmp_path / "logs" / "generation-0.log"
    await until(lambda: log.exists() and f"{{{core}}}" in log.read_text())
    assert (await running.stopped()).code == 0


def test_a_killed_runner_leaves_nothing_behind(tmp_path: Path) -> None:
    token = uuid.uuid4().hex
    runner = f"""
import asyncio
from pathlib import Path
from tests.support.jobs.local_processes import FOREVER, STOPS, process
from rlhf_cli.local.job_supervisor import JobSupervisor
folder = Path({str(tmp_path)!r})
found = [process(folder, "coordinator", STOPS), process(folder, "generation-0", FOREVER)]
asyncio.run(JobSupervisor(found, 3, {token!r}, print).run())
"""
    started = subprocess.Popen([sys.executable, "-c", runner], cwd=ROOT)
    try:
        wait_for(lambda: len(leftover_processes.find_processes(token)) == 2)
        started.kill()
        started.wait()
        wait_for(lambda: leftover_processes.find_processes(token) == [])
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        leftover_processes.kill_processes(token)


def wait_for(condition: Callable[[], bool]) -> None:
    asyncio.run(until(condition))


def test_ports_are_free_and_below_the_ephemeral_range() -> None:
    ports = free_ports(Random(1))
    taken = next(ports)
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert taken < first_ephemeral
    with socket.socket() as server:
        server.bind(("127.0.0.1", taken))
        server.listen()
        with pytest.raises(RunError, match=f"--port {taken}: the address 127.0.0.1:{taken} is in use") as refused:
            claim(taken)
        assert refused.value.exit_code == 24
        assert taken not in [port for _, port in zip(range(50), free_ports(Random(1)), strict=False)]
