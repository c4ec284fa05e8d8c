"""The coordinator as a separate process: killed at random moments, stopped, started wrongly, out of disk."""

import asyncio
import itertools
import json
import random
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from tests.support.coordinator.coordinated import expected_weights, prompts_of, write_files
from tests.support.coordinator.coordinator_process import CoordinatorProcess
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import Crew, crew

from rlhf_api.protocol import PROTOCOL, mismatch
from rlhf_common.channels import aio_channel
from rlhf_common.control_pb2 import WatchStatusRequest
from rlhf_common.control_pb2_grpc import CoordinatorStub
from rlhf_common.names import Env, ExitCode, Group
from rlhf_operator.certificates import new_authority
from rlhf_operator.reconcile.observed.termination_log import last_report

COUNTS = {Group.GENERATION: 2, Group.INFERENCE: 2, Group.TRAINING: 2}
SEED = 9
"""Seed of the moments of kills."""


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[CoordinatorProcess]:
    coordinator = CoordinatorProcess(tmp_path)
    yield coordinator
    if coordinator.process is not None and coordinator.process.poll() is None:
        coordinator.kill()


async def finish(workers: Crew) -> str:
    """Return the weights that all ranks have."""
    await workers.end()
    (weights,) = {workers[f"training-{rank}"].weights for rank in (0, 1)}
    return weights


async def test_kill_9_at_random_moments_changes_nothing(process: CoordinatorProcess, tmp_path: Path) -> None:
    job = write_files(tmp_path, iterations=10, batch=24)
    process.start()
    workers = crew(COUNTS, process.address, pace=Pace(tokens_per_tick=1, train_seconds=0.1))
    rng = random.Random(SEED)
    for _ in range(3):
        await process.until_serving()
        await asyncio.sleep(rng.uniform(0.0, 1.2))
        process.kill()
        process.start()
    assert await process.code() == ExitCode.OK
    assert await finish(workers) == expected_weights(job, prompts=prompts_of(job))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["phase"] == "Complete"
    assert summary["coordinator_starts"] == 4
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(10))


async def test_a_job_file_of_a_newer_version_and_workers_of_both_neighbours(
    process: CoordinatorProcess, tmp_path: Path
) -> None:
    job = write_files(tmp_path, iterations=3)
    document = yaml.safe_load((tmp_path / "job.yaml").read_text())
    document["spec"] |= {"newBlock": {"mode": "Auto"}}
    document["spec"]["generation"]["newField"] = 7
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    process.start()
    workers = crew(COUNTS, process.address)
    for worker, version in zip(workers.workers, itertools.cycle((PROTOCOL - 1, PROTOCOL, PROTOCOL + 1))):
        worker.protocol = version
    assert await process.code() == ExitCode.OK
    assert await finish(workers) == expected_weights(job, prompts=prompts_of(job))


async def test_a_worker_of_a_distant_version_is_named_in_what_the_job_waits_for(
    process: CoordinatorProcess, tmp_path: Path
) -> None:
    job = write_files(tmp_path, iterations=3)
    process.start()
    workers = crew(COUNTS, process.address)
    stranger = workers["training-0"]
    stranger.protocol = PROTOCOL + 2
    why = mismatch("training-0", PROTOCOL + 2, PROTOCOL)
    await process.until_serving()
    async with aio_channel(process.address, None) as channel:
        async for status in CoordinatorStub(channel).WatchStatus(WatchStatusRequest(max_rate_hz=20)):
            if any(f"training-0 to register: {why}" in item for item in status.waiting_for):
                break
    assert process.process is not None
    assert process.process.poll() is None
    stranger.protocol = PROTOCOL
    assert await process.code() == ExitCode.OK
    assert await finish(workers) == expected_weights(job, prompts=prompts_of(job))


async def test_sigterm_checkpoints_and_resume_must_be_asked_for(process: CoordinatorProcess, tmp_path: Path) -> None:
    job = write_files(tmp_path, iterations=4, every=100)
    process.start()
    workers = crew(COUNTS, process.address, pace=Pace(tokens_per_tick=1))
    await process.until_iteration(2)
    assert process.process is not None
    process.process.send_signal(signal.SIGTERM)
    assert await process.code() == ExitCode.INTERRUPTED
    await workers.end()
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert f"the last checkpoint is {checkpoint}" in process.last_line
    assert json.loads((checkpoint / "checkpoint.json").read_text())["version"] >= 2
    process.start({Env.RUN_DIR: str(tmp_path / "other")})
    assert await process.code() == ExitCode.USAGE
    assert checkpoint.name in process.last_line
    assert "--resume" in process.last_line
    assert "spec.checkpoints.path" in process.last_line
    message_file = tmp_path / "termination-message"
    process.start({Env.RUN_DIR: str(tmp_path / "other"), Env.RESUME: "1", Env.TERMINATION_MESSAGE: str(message_file)})
    workers = crew(COUNTS, process.address)
    assert await process.code() == ExitCode.OK
    said = last_report(message_file.read_text())
    assert said is not None
    assert (said.iteration, said.checkpoint) == (4, str(checkpoint.with_name("iteration-000004")))
    assert "reward" in said.metrics
    assert await finish(workers) == expected_weights(job, prompts=prompts_of(job))


async def test_renewed_certificates_are_taken_up_by_who_runs_and_who_comes_back(
    process: CoordinatorProcess, tmp_path: Path
) -> None:
    """Renew the authority too, so that the old certificate is as good as expired."""
    job = write_files(tmp_path, iterations=12, batch=24)
    folder = tmp_path / "certificates"
    renew(folder)
    process.start({Env.CERTIFICATES: str(folder)})
    workers = crew(COUNTS, process.address, pace=Pace(tokens_per_tick=1, train_seconds=0.1), certificates=folder)
    await process.until_iteration(2, certificates=folder)
    renew(folder)
    # The same process accepts a new certificate, and keeps its present sessions.
    await process.until_iteration(4, certificates=folder)
    process.kill()
    process.start({Env.CERTIFICATES: str(folder)})
    assert await process.code() == ExitCode.OK
    assert await finish(workers) == expected_weights(job, prompts=prompts_of(job))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["coordinator_starts"] == 2


def renew(folder: Path) -> None:
    """Write new certificate files."""
    now = datetime.now(UTC)
    new_authority("simulated", now).issue([], now).write(folder)


async def test_a_bad_prompt_line_is_named(process: CoordinatorProcess, tmp_path: Path) -> None:
    write_files(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "p1"\n')
    process.start()
    assert await process.code() == ExitCode.BAD_DATA
    assert f"spec.prompts.path: {tmp_path}/prompts.jsonl line 12 is not JSON" in process.last_line


async def test_a_broken_tokenizer_is_named(process: CoordinatorProcess, tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "policy" / "tokenizer.json").write_text("{")
    process.start()
    assert await process.code() == ExitCode.BAD_MODEL
    assert f"spec.models.actor.path: {tmp_path}/policy: its tokenizer cannot be loaded" in process.last_line


async def test_a_port_in_use_is_named(process: CoordinatorProcess, tmp_path: Path) -> None:
    write_files(tmp_path)
    other = await asyncio.start_server(lambda *_: None, *process.address.rsplit(":", 1))
    process.start()
    assert await process.code() == ExitCode.ADDRESS_IN_USE
    assert "RLHF_LISTEN" in process.last_line
    assert process.address in process.last_line
    other.close()


async def test_a_full_disk_ends_the_job_with_its_own_code(process: CoordinatorProcess, tmp_path: Path) -> None:
    write_files(tmp_path, iterations=20)

    def small_files() -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails instead of killing
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    process.start(preexec=small_files)
    workers = crew(COUNTS, process.address)
    assert await process.code() == ExitCode.STORAGE
    assert "RLHF_RUN_DIR" in process.last_line
    await workers.end()
