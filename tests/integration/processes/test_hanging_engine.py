"""A real worker whose engine loads slowly, then hangs in a step: it reports its place, stays connected, and ends."""

import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest
from tests.support.coordinator.scripted_coordinator import PATIENCE, ScriptedCoordinator, worker_process
from tests.support.jobs.hanging_engine import GATE
from tests.support.model_folders.models import write_policy

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack, unpack
from rlhf_common.names import ExitCode

pytestmark = pytest.mark.full


def job(folder: Path) -> str:
    source = {"path": str(folder / "policy")}
    spec = {
        "algorithm": {"grpo": {}},
        "models": {"actor": source, "reward": {"function": {"module": "rewards"}}},
        "prompts": {"path": "prompts.jsonl"},
        "generation": {"engine": "tests.support.jobs.hanging_engine"},
        "runPolicy": {"hangTimeoutSeconds": 5},  # more than the first step takes on any machine
    }
    return json.dumps(
        {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "tiny"}, "spec": spec}
    )


async def test_a_worker_is_heard_while_it_builds_and_ends_by_itself_when_a_step_hangs(tmp_path: Path) -> None:
    write_policy(tmp_path / "policy")
    gate, scripted = tmp_path / "gate", ScriptedCoordinator()
    os.mkfifo(gate)
    await scripted.listen(None)
    environment = {GATE: str(gate), "PYTHONPATH": str(Path(__file__).parents[3])}
    try:
        async with worker_process(scripted.address, "generation", tmp_path / "log", **environment) as process:
            session = await scripted.session()
            session.welcome(job(tmp_path))
            session.send(1, become_generation=pb.BecomeGeneration())
            await session.all("heartbeat", 3, lambda beat: beat.stage == "compiling for 8 batch sizes")
            await asyncio.to_thread(gate.write_bytes, b"go on")
            assert not (await session.done(1)).HasField("failure")
            beat = await session.first("heartbeat", lambda beat: not beat.stage and beat.busy_seconds > 0)
            assert beat.engine == "tests.support.jobs.hanging_engine: spec.generation.engine names it"

            sample = pb.GenerateSample(
                key=pb.SampleKey(iteration=0, sample=3, attempt=1),
                prompt=pack(np.array([5, 6, 7], np.int32)),
                random_key=4,
                max_response_tokens=20,
            )
            session.send(2, generate=pb.Generate(samples=[sample]))
            last = await session.first("done", lambda done: not done.command_id)
            assert last.failure.reason == "StepHangs"
            assert "a step has not ended for " in last.failure.message
            assert "hanging_engine.py" in last.failure.message or "threading.py" in last.failure.message
            assert last.failure.field == "spec.runPolicy.hangTimeoutSeconds"
            assert await asyncio.wait_for(process.wait(), PATIENCE) == ExitCode.FAILED
    finally:
        await scripted.stop()
    lines = (tmp_path / "log").read_text()
    assert "a decode step hangs at:" in lines
    assert "threading.Event().wait()" in lines, "the line that it hangs in"
    assert "exit 1: StepHangs" in lines.splitlines()[-1]
    tokens = [len(unpack(message.tokens)) for message in await session.all("progress", 0)]
    assert sum(tokens) <= 2
