"""A real coordinator and a real worker that are stopped in the middle: their kubelets notice; slow work is no hang.

SIGSTOP stands for a process that hangs as a whole. The probes work like a kubelet's, with shorter time-outs.
"""

import asyncio
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import expected_weights, prompts_of, write_files
from tests.support.coordinator.coordinator_process import CoordinatorProcess
from tests.support.coordinator.scripted_coordinator import ScriptedCoordinator, worker_process
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import crew
from tests.support.jobs.chaos import processes
from tests.support.jobs.local_job import HOLD, write_job
from tests.support.loopback import free_address

from rlhf_common import control_pb2 as pb
from rlhf_common.channels import aio_channel
from rlhf_common.control_pb2_grpc import CoordinatorStub
from rlhf_common.endpoint import LIVENESS_PATH
from rlhf_common.names import Env, ExitCode, Group

pytestmark = pytest.mark.full


PATIENCE = 240.0
COUNTS = {Group.GENERATION: 2, Group.INFERENCE: 2, Group.TRAINING: 2}


def answer(address: str, seconds: float = 5.0) -> int:
    """Return the status that a probe sees; 0: no answer in time."""
    try:
        with urllib.request.urlopen(f"http://{address}{LIVENESS_PATH}", timeout=seconds) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


async def until(address: str, status: int) -> None:
    def ask() -> None:
        deadline = time.monotonic() + PATIENCE
        while (result := answer(address)) != status:
            assert time.monotonic() < deadline, f"{result}, not {status}"
            time.sleep(0.1)

    await asyncio.to_thread(ask)


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[CoordinatorProcess]:
    process = CoordinatorProcess(tmp_path)
    yield process
    if process.process is not None and process.process.poll() is None:
        process.kill()


async def test_a_coordinator_answers_while_it_waits_for_its_journal_and_not_when_it_is_stopped(
    coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    write_files(tmp_path, iterations=2)
    first, second = free_address(), free_address()
    coordinator.start({Env.METRICS: first})
    await coordinator.until_serving()
    await until(first, 200)

    # A coordinator that waits for the journal's lock cannot serve its job, but must not be killed for it.
    other = CoordinatorProcess(tmp_path)
    other.start({Env.METRICS: second})
    try:
        await until(second, 200)
        assert other.process is not None
        assert other.process.poll() is None
    finally:
        other.kill()

    assert coordinator.process is not None
    coordinator.process.send_signal(signal.SIGSTOP)
    await until(first, 0)
    coordinator.process.send_signal(signal.SIGCONT)
    await until(first, 200)


SLOW_TORCH = """
import sys, time
from pathlib import Path

class Slow:
    def find_spec(self, name, path=None, target=None):
        while name == "torch" and not Path({gate!r}).exists():
            time.sleep(0.05)

sys.meta_path.insert(0, Slow())
"""


async def test_a_worker_answers_before_its_libraries_are_loaded_and_not_when_it_is_stopped(tmp_path: Path) -> None:
    scripted, address, gate = ScriptedCoordinator(), free_address(), tmp_path / "gate"
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW_TORCH.format(gate=str(gate)))
    await scripted.listen(None)
    environment = {Env.METRICS: address, "PYTHONPATH": str(tmp_path / "slow")}
    try:
        async with worker_process(scripted.address, "generation", tmp_path / "log", **environment) as process:
            await until(address, 200)
            gate.touch()
            await scripted.session()
            assert await asyncio.to_thread(answer, address, PATIENCE) == 200
            process.send_signal(signal.SIGSTOP)
            await until(address, 0)
            process.send_signal(signal.SIGCONT)
            await until(address, 200)
    finally:
        await scripted.stop()


async def test_a_coordinator_that_was_cut_off_ends_when_it_comes_back_and_harms_nothing(
    coordinator: CoordinatorProcess, tmp_path: Path
) -> None:
    """Remove the lock meanwhile, as a file server does when a node is silent for its lease."""
    job = write_files(tmp_path, iterations=6, batch=24)
    coordinator.start()
    first = crew(COUNTS, coordinator.address, pace=Pace(tokens_per_tick=1, train_seconds=0.1))
    await coordinator.until_iteration(2)
    assert coordinator.process is not None
    coordinator.process.send_signal(signal.SIGSTOP)
    for worker in first.workers:
        worker.leave()
    (tmp_path / "run" / "journal" / "coordinator.lock").unlink()

    second = CoordinatorProcess(tmp_path)
    second.start()
    workers = crew(COUNTS, second.address, pace=Pace(tokens_per_tick=1, train_seconds=0.1))
    try:
        await second.until_iteration(4)
        coordinator.process.send_signal(signal.SIGCONT)
        assert await coordinator.code() == ExitCode.RESTART
        assert "JournalTaken" in (tmp_path / "log").read_text()
        assert await second.code() == ExitCode.OK
        await workers.end()
        (weights,) = {workers[f"training-{rank}"].weights for rank in (0, 1)}
        assert weights == expected_weights(job, prompts=prompts_of(job))
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["phase"] == "Complete"
    finally:
        await first.end()
        if second.process is not None and second.process.poll() is None:
            second.kill()


async def worker_state(run_dir: Path, address: str, name: str) -> tuple[str, float]:
    """Return (state, seconds of silence) of a worker, as its coordinator reports it."""
    async with aio_channel(address, run_dir / "certificates") as channel:
        status = await CoordinatorStub(channel).GetStatus(pb.GetStatusRequest(), wait_for_ready=True, timeout=60)
    return next((worker.state, worker.silent_seconds) for worker in status.workers if worker.worker == name)


@pytest.mark.timeout(1800)
async def test_a_worker_that_hangs_is_lost_for_its_coordinator_killed_and_replaced(tmp_path: Path) -> None:
    """Run a real job on one machine that cannot continue without this rank; probe its processes as a kubelet does."""
    manifest, run_dir, port = write_job(tmp_path, iterations=8), tmp_path / "run", free_address().rpartition(":")[2]
    (tmp_path / HOLD).write_text(f"{run_dir / 'metrics.jsonl'}\n7\n")
    policy = ["--set", "spec.runPolicy.hangTimeoutSeconds=20", "--set", "spec.runPolicy.workerTimeoutSeconds=6"]
    command = [sys.executable, "-m", "rlhf_cli.main", "run", str(manifest), "--run-dir", str(run_dir)]
    with (tmp_path / "output").open("wb") as output:
        run = await asyncio.create_subprocess_exec(
            *command, "--plain", "--port", port, *policy, stdout=output, stderr=output
        )
    try:
        await until_written(run_dir / "metrics.jsonl", '"iteration": 1,')
        stopped = await pid_of("training-1", run.pid)
        os.kill(stopped, signal.SIGSTOP)
        (tmp_path / HOLD).unlink()
        async with asyncio.timeout(PATIENCE):
            silence = 0.0
            while not silence:
                state, silence = await worker_state(run_dir, f"127.0.0.1:{port}", "training-1")
        assert state == "Lost"
        await until_written(tmp_path / "output", "training-1: did not answer for 20 s")
        await until_written(tmp_path / "output", "training-1: ended with signal 9")
        assert await asyncio.wait_for(run.wait(), PATIENCE) == ExitCode.OK
    finally:
        if run.returncode is None:
            run.kill()
            await run.wait()


async def pid_of(name: str, runner: int) -> int:
    """Return the process of this worker; a single check may miss it while processes restart."""
    async with asyncio.timeout(PATIENCE):
        while name not in (found := processes(runner)):  # noqa: ASYNC110 /proc tells nobody
            await asyncio.sleep(0.05)
    return found[name]


async def until_written(file: Path, text: str) -> None:
    def look() -> None:
        deadline = time.monotonic() + PATIENCE
        while not file.exists() or text not in file.read_text():
            assert time.monotonic() < deadline, f"{text!r} never came into {file}"
            time.sleep(0.1)

    await asyncio.to_thread(look)
