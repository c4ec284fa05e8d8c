"""A vLLM worker with two executor processes, on a CPU: tokens with new weights, one killed, the whole worker killed."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from tests.support.coordinator.scripted_coordinator import (
    PATIENCE,
    ScriptedCoordinator,
    ScriptedSession,
    worker_process,
)
from tests.support.model_folders.models import write_policy

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack, unpack
from rlhf_common.names import ExitCode
from rlhf_common.samples import SampleKey, SampleRequest
from rlhf_workers.generation.engine_registry import build_engine
from rlhf_workers.models.loading import load_tokenizer
from rlhf_workers.weights.folder import read_folder

pytestmark = pytest.mark.full


SAMPLES, TOKENS = 6, 40
HEADS: Final[dict[str, Any]] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
SHARED_MEMORY = Path("/dev/shm")


def job(policy: Path, **generation: Any) -> str:
    source = {"path": str(policy)}
    spec = {
        "algorithm": {"grpo": {}},
        "models": {"actor": source, "reward": {"function": {"module": "rewards"}}},
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"maxPromptTokens": 16, "maxResponseTokens": TOKENS},
        "generation": {"maxBatchSize": SAMPLES, **generation},
    }
    return json.dumps(
        {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "tiny"}, "spec": spec}
    )


def prompt(index: int) -> np.ndarray:
    return np.arange(3, 6 + index, dtype=np.int32)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-heads") / "policy"
    write_policy(folder, **HEADS)
    return folder


def shown(file: Path) -> str:
    """Return the kernel's text about a thread or process; empty if it has just ended."""
    try:
        return file.read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children(pid: int) -> list[int]:
    """Return all processes below one, whichever of its threads started them."""
    tasks = Path(f"/proc/{pid}/task")
    below = [int(child) for task in [*tasks.glob("*")] for child in shown(task / "children").split()]
    return [*below, *(grandchild for child in below for grandchild in children(child))]


def executors(pid: int) -> list[int]:
    named = [child for child in children(pid) if "Worker_TP" in shown(Path(f"/proc/{child}/cmdline"))]
    assert len(named) == 2
    return named


async def until(condition: Callable[[], bool], event: str) -> None:
    def look() -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, event
            time.sleep(0.1)

    await asyncio.to_thread(look)


def shared_names(pids: list[int]) -> set[str]:
    """Return named memory that these processes share and that others can open."""
    lines = "".join(shown(Path(f"/proc/{pid}/maps")) for pid in pids).splitlines()
    return {path for path in (line.partition("/dev/shm/")[2] for line in lines) if path and "(deleted)" not in path}


def lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def decoding(scripted: ScriptedCoordinator, policy: Path, number: int = 1) -> ScriptedSession:
    """Return the session of a worker of two processes that has built its engine and verifies drafts."""
    session = await scripted.session()
    drafts = {"mode": "Fixed", "maxTokens": 4, "drafters": ["Ngram"]}
    session.welcome(job(policy, engine="vllm", parallelism={"tensor": 2}, speculation=drafts))
    session.send(number, become_generation=pb.BecomeGeneration())
    done = await session.done(number)
    assert not done.HasField("failure"), done.failure.message
    return session


def lease(session: ScriptedSession, number: int, tokens: int = TOKENS) -> None:
    samples = [
        pb.GenerateSample(
            key=pb.SampleKey(iteration=0, sample=index, attempt=number),
            prompt=pack(prompt(index)),
            random_key=index + 11,
            max_response_tokens=tokens,
        )
        for index in range(SAMPLES)
    ]
    session.send(number, generate=pb.Generate(samples=samples))


async def test_two_processes_draw_the_tokens_of_one_and_a_killed_one_ends_the_worker_in_words(
    tmp_path: Path, policy: Path
) -> None:
    spec = RLHFJob.model_validate_json(job(policy, engine="torch")).spec
    engine = build_engine(spec, load_tokenizer(str(policy), "f"), torch.device("cpu"))
    trained = write_policy(tmp_path / "trained", seed=1, **HEADS)
    engine.load_weights(read_folder("actor", trained), 1)
    engine.submit([SampleRequest(SampleKey(0, n, 1), prompt(n), n + 11, TOKENS) for n in range(SAMPLES)])
    expected: dict[int, list[int]] = {}
    while engine.in_flight:
        expected |= {part.key.sample: part.tokens.tolist() for part in engine.step().finished}

    scripted = ScriptedCoordinator()
    await scripted.listen(None)
    try:
        async with worker_process(scripted.address, "generation", tmp_path / "log") as process:
            session = await decoding(scripted, policy)
            started = executors(process.pid)
            assert not [name for name in shared_names(started) if name.startswith("vllm_dist_")]
            load = pb.LoadWeights(model="actor", version=1, sources=[pb.WeightLocation(folder=str(trained))])
            session.send(4, load_weights=load)
            loaded = await session.done(4)
            assert loaded.load.version == 1, loaded.failure.message
            lease(session, 2)
            finished = {message.key.sample: message for message in await session.all("finished", SAMPLES)}
            assert {index: unpack(message.tokens).tolist() for index, message in finished.items()} == expected
            assert sum(message.drafted_tokens for message in finished.values()) > 0, "or both only decoded"

            os.kill(started[1], signal.SIGKILL)
            lease(session, 3)
            last = await session.first("done", lambda done: not done.command_id)
            assert "ended with signal 9" in last.failure.message
            assert f"(pid {started[1]})" in last.failure.message
            assert await asyncio.wait_for(process.wait(), PATIENCE) == ExitCode.FAILED
            await until(lambda: not any(map(lives, started)), "an executor process outlived its worker")
    finally:
        await scripted.stop()


async def test_executor_processes_end_with_a_worker_that_is_killed(tmp_path: Path, policy: Path) -> None:
    scripted = ScriptedCoordinator()
    await scripted.listen(None)
    try:
        async with worker_process(scripted.address, "generation", tmp_path / "log") as process:
            await decoding(scripted, policy)
            below = children(process.pid)
            shared = shared_names([process.pid, *executors(process.pid)])
            os.kill(executors(process.pid)[0], signal.SIGSTOP)  # one that waits in a collective handles no signals
            process.kill()
            await until(lambda: not any(map(lives, below)), "a process outlived its worker")
    finally:
        await scripted.stop()
    await until(lambda: not any(map(is_open, shared)), f"names of shared memory were left: {shared}")


def is_open(name: str) -> bool:
    return (SHARED_MEMORY / name).exists()
