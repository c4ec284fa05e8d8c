"""The coordinator as a process of its own: killed at random moments, stopped, started wrongly, out of disk."""

import asyncio
import contextlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
import yaml
from tests.coordinated import expected_weights, free_address, make_job
from tests.simulated_worker import Crew, Pace, crew
from tokenizers import Tokenizer, models, pre_tokenizers

from rlhf_api.channels import aio_channel
from rlhf_api.control_pb2 import GetStatusRequest, WatchStatusRequest
from rlhf_api.control_pb2_grpc import CoordinatorStub
from rlhf_api.job import RLHFJob
from rlhf_api.names import Env, ExitCode, Group
from rlhf_operator.coordinator.prompts import Prompt, PromptSet

pytestmark = pytest.mark.slow

COUNTS = {Group.GENERATION: 2, Group.INFERENCE: 2, Group.TRAINING: 2}


def write_files(folder: Path, **spec: object) -> RLHFJob:
    """Manifest, prompts and a tokenizer on disk."""
    job = make_job(folder, **spec)  # type: ignore[arg-type]
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, **{f"p{n}": n + 1 for n in range(20)}}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "policy" / "tokenizer.json"))
    (folder / "policy" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "policy" / "config.json").write_text('{"model_type": "llama"}')
    lines = [json.dumps({"prompt": f"p{n} p{n + 1}"}) for n in range(11)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "job.yaml").write_text(yaml.safe_dump(job.model_dump(by_alias=True, exclude_none=True, mode="json")))
    return job


def prompts_of(job: RLHFJob) -> PromptSet:
    """What the process must read from the files of `write_files`."""
    lines = [
        Prompt(n + 1, struct.pack("<2i", n + 1, n + 2), f"p{n} p{n + 1}", json.dumps({"prompt": f"p{n} p{n + 1}"}))
        for n in range(11)
    ]
    return PromptSet(lines, seed=5, shuffle=True, per_iteration=job.spec.rollout.batch_size, samples_per_prompt=1)


class Process:
    """The coordinator's process and its successors."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, free_address()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, preexec: Callable[[], None] | None = None, **environment: str) -> None:
        variables = {
            Env.JOB_FILE: str(self.folder / "job.yaml"),
            Env.RUN_DIR: str(self.folder / "run"),
            Env.LISTEN: self.address,
            **environment,
        }
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_operator.coordinator"],
                env={**os.environ, **variables},
                stderr=log,
                preexec_fn=preexec,
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def code(self, seconds: float = 60.0) -> int:
        assert self.process is not None
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), seconds)

    async def until_serving(self) -> None:
        """A connection may still be to the process before: then another one is made."""
        while True:
            async with aio_channel(self.address, None) as channel:
                with contextlib.suppress(grpc.RpcError):
                    await CoordinatorStub(channel).GetStatus(GetStatusRequest(), wait_for_ready=True, timeout=30)
                    return

    async def until_iteration(self, iteration: int) -> None:
        async with aio_channel(self.address, None) as channel:
            call = CoordinatorStub(channel).WatchStatus(WatchStatusRequest(max_rate_hz=20), wait_for_ready=True)
            async for status in call:
                if status.iteration >= iteration:
                    return

    @property
    def last_line(self) -> str:
        return (self.folder / "log").read_text().splitlines()[-1]


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    coordinator = Process(tmp_path)
    yield coordinator
    if coordinator.process is not None and coordinator.process.poll() is None:
        coordinator.kill()


async def finish(workers: Crew) -> str:
    """The weights all ranks agree on."""
    await workers.end()
    (weights,) = {workers[f"training-{rank}"].weights for rank in (0, 1)}
    return weights


async def test_kill_9_at_random_moments_changes_nothing(process: Process, tmp_path: Path) -> None:
    job = write_files(tmp_path, iterations=10, batch=24)
    process.start()
    workers = crew(COUNTS, process.address, pace=Pace(tokens_per_tick=1, train_seconds=0.1))
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
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


async def test_sigterm_checkpoints_and_resume_must_be_asked_for(process: Process, tmp_path: Path) -> None:
    job = write_files(tmp_path, iterations=4, every=100)
    process.start()
    workers = crew(COUNTS, process.address, pace=Pace(tokens_per_tick=1))
    await process.until_iteration(2)
    assert process.process is not None
    process.process.send_signal(signal.SIGTERM)
    assert await process.code() == ExitCode.INTERRUPTED
    await workers.end()
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert json.loads((checkpoint / "checkpoint.json").read_text())["version"] >= 2
    process.start(**{Env.RUN_DIR: str(tmp_path / "other")})
    assert await process.code() == ExitCode.USAGE
    assert checkpoint.name in process.last_line
    assert "--resume" in process.last_line
    assert "spec.checkpoints.path" in process.last_line
    process.start(**{Env.RUN_DIR: str(tmp_path / "other"), Env.RESUME: "1"})
    workers = crew(COUNTS, process.address)
    assert await process.code() == ExitCode.OK
    assert await finish(workers) == expected_weights(job, prompts=prompts_of(job))


async def test_a_bad_prompt_line_is_named(process: Process, tmp_path: Path) -> None:
    write_files(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "p1"\n')
    process.start()
    assert await process.code() == ExitCode.BAD_DATA
    assert f"spec.prompts.path: {tmp_path}/prompts.jsonl line 12 is not JSON" in process.last_line


async def test_a_broken_tokenizer_is_named(process: Process, tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "policy" / "tokenizer.json").write_text("{")
    process.start()
    assert await process.code() == ExitCode.BAD_MODEL
    assert f"spec.models.actor.path: {tmp_path}/policy: its tokenizer cannot be loaded" in process.last_line


async def test_a_port_in_use_is_named(process: Process, tmp_path: Path) -> None:
    write_files(tmp_path)
    other = await asyncio.start_server(lambda *_: None, *process.address.rsplit(":", 1))
    process.start()
    assert await process.code() == ExitCode.ADDRESS_IN_USE
    assert "RLHF_LISTEN" in process.last_line
    assert process.address in process.last_line
    other.close()


async def test_a_full_disk_ends_the_job_with_its_own_code(process: Process, tmp_path: Path) -> None:
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
