"""Workers forked from one preloaded process: each has its identity, its end is observed, none outlives the run."""

import asyncio
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest

from rlhf_cli.local import fork_client, leftover_processes
from rlhf_cli.local.fork_client import ForkedProcess, ForkServerClient, ForkServerError, forkable
from rlhf_cli.local.pods_to_processes import LocalProcess
from rlhf_cli.local.ports import free_ports
from rlhf_common.names import Env, ExitCode, Group


def worker(folder: Path, index: int, *, coordinator: str = "127.0.0.1:1", **other: str) -> LocalProcess:
    """Return a worker that dials an address without a coordinator."""
    name = f"generation-{index}"
    port = next(free_ports(Random()))
    env = {
        Env.GROUP: "generation",
        Env.INDEX: str(index),
        Env.COORDINATOR: coordinator,
        Env.LISTEN: f"127.0.0.1:{port}",
        Env.DEVICE: "cpu",
        Env.THREADS: "1",
        "CUDA_VISIBLE_DEVICES": "",
        **other,
    }
    command = (sys.executable, "-m", "rlhf_workers")
    return LocalProcess(
        name, Group.GENERATION, command, {str(k): v for k, v in env.items()}, folder, folder / f"{name}.log"
    )


def title(pid: int) -> str:
    """Return the title that `top` shows."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def until(condition: Callable[[], bool], event: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {event}"
        await asyncio.sleep(0.05)


def titled(pid: int, name: str) -> bool:
    """Return whether a process has this title."""
    return title(pid) == name


def says(log: Path, words: str) -> bool:
    """Return whether a log contains these words."""
    return words in log.read_text()


async def test_forked_workers_are_told_apart_and_end_as_any_process(tmp_path: Path) -> None:
    token = uuid.uuid4().hex
    server = ForkServerClient({leftover_processes.TOKEN_VARIABLE: token})
    try:
        first, second = [await server.start(worker(tmp_path, index)) for index in range(2)]
        for index, forked in enumerate((first, second)):
            named = partial(titled, forked.pid, f"generation-{index}")
            await until(named, f"generation-{index} to be itself")
            assert os.getpgid(forked.pid) == forked.pid
            log = tmp_path / f"generation-{index}.log"
            await until(partial(says, log, "dials the coordinator"), f"{log} to say that it dials")
            assert f"generation-{index} " in log.read_text()

        os.kill(first.pid, signal.SIGKILL)
        assert await asyncio.wait_for(first.wait(), 120) == -signal.SIGKILL
        os.kill(second.pid, signal.SIGTERM)
        assert await asyncio.wait_for(second.wait(), 120) == ExitCode.OK

        wrong = await server.start(worker(tmp_path, 2, coordinator="nowhere"))
        assert await asyncio.wait_for(wrong.wait(), 120) == ExitCode.USAGE
        assert "RLHF_COORDINATOR" in (tmp_path / "generation-2.log").read_text().splitlines()[-1]
    finally:
        await server.close()
    await until(lambda: leftover_processes.find_processes(token) == [], "what the server had forked to be gone")


async def test_the_death_of_the_server_is_the_death_of_its_workers_and_the_next_start_makes_another(
    tmp_path: Path,
) -> None:
    token = uuid.uuid4().hex
    server = ForkServerClient({leftover_processes.TOKEN_VARIABLE: token})
    try:
        before = await server.start(worker(tmp_path, 0))
        server.kill()
        assert await asyncio.wait_for(before.wait(), 120) == -signal.SIGKILL
        await until(lambda: not Path(f"/proc/{before.pid}").exists(), "the worker to be gone")
        after = await server.start(worker(tmp_path, 0))
        assert after.pid != before.pid
        assert not server.broken
    finally:
        await server.close()
    await until(lambda: leftover_processes.find_processes(token) == [], "what the server had forked to be gone")


async def test_a_server_that_cannot_start_says_where_to_look(tmp_path: Path) -> None:
    (tmp_path / "rlhf_workers").mkdir()
    (tmp_path / "rlhf_workers" / "__init__.py").write_text("raise RuntimeError('no torch here')")
    server = ForkServerClient({leftover_processes.TOKEN_VARIABLE: uuid.uuid4().hex})
    with pytest.raises(ForkServerError, match=r"fork-server\.log"):
        await server.start(worker(tmp_path, 0))
    assert "no torch here" in (tmp_path / "fork-server.log").read_text()
    assert server.broken
    await server.close()


def test_what_cannot_be_forked(tmp_path: Path) -> None:
    assert forkable(worker(tmp_path, 0))
    assert not forkable(worker(tmp_path, 0, CUDA_VISIBLE_DEVICES="0"))
    assert not forkable(worker(tmp_path, 0, **{Env.THREADS: "4"}))


async def test_a_server_that_is_too_slow_is_given_up_for_all_who_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "READY_SECONDS", 0.01)
    server = ForkServerClient({leftover_processes.TOKEN_VARIABLE: uuid.uuid4().hex})
    monkeypatch.setattr(server, "kill", lambda: None)  # it takes time to die
    try:
        async with asyncio.timeout(120):
            starts = (server.start(worker(tmp_path, index)) for index in range(3))
            answers = await asyncio.gather(*starts, return_exceptions=True)
        assert [type(answer) for answer in answers] == [ForkServerError] * 3
        assert "started one by one" in server.broken
    finally:
        monkeypatch.undo()
        await server.close()


async def test_starts_that_meet_a_dying_server_end_and_do_not_wait_for_it(tmp_path: Path) -> None:
    server = ForkServerClient({leftover_processes.TOKEN_VARIABLE: uuid.uuid4().hex})
    try:
        await server.start(worker(tmp_path, 0))
        server.kill()
        starts = [server.start(worker(tmp_path, index)) for index in (1, 2, 3)]
        result = await asyncio.wait_for(asyncio.gather(*starts, return_exceptions=True), 240)
        assert all(isinstance(item, ForkedProcess | ForkServerError) for item in result)
        assert isinstance(result[-1], ForkedProcess)
    finally:
        await server.close()
