"""Samples that move between real generation workers with their KV caches: whatever breaks, and whenever, one worker
goes on with each sample, and its tokens and log-probabilities are, to the last bit, those of an undisturbed one."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from tests.integration.scripted_coordinator import ScriptedCoordinator, ScriptedSession, worker_process
from tests.models import SPECIAL, VOCABULARY, write_policy

from rlhf_api import control_pb2 as pb
from rlhf_api.arrays import pack, unpack
from rlhf_api.names import Env
from rlhf_operator.certificates import new_authority
from rlhf_workers.generation.messages import request_of
from rlhf_workers.generation.protocol import Response, SamplingParameters
from rlhf_workers.generation.torch_engine import EngineLimits, TorchEngine
from rlhf_workers.models import load_causal_lm, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

RESPONSE = 400
"""Tokens of a response: more than a second of decoding."""
SLOTS = 4
TOP_K = 16


def write_long_policy(folder: Path) -> Path:
    """A policy whose end-of-sequence token is never among the TOP_K most probable ones."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
    path = write_policy(folder / "policy", "llama", **sizes)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][1] = 0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def job(folder: Path) -> str:
    spec = {
        "algorithm": {"grpo": {}},
        "deterministic": True,
        "models": {
            "actor": {"path": str(folder / "policy")},
            "reward": {"function": {"file": str(folder / "reward.py")}},
        },
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"maxPromptTokens": 32, "maxResponseTokens": RESPONSE, "topK": TOP_K},
        "generation": {"maxBatchSize": SLOTS},
    }
    return json.dumps(
        {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "moves"}, "spec": spec}
    )


def sample(number: int, epoch: int = 1, tokens: int = RESPONSE) -> pb.GenerateSample:
    random = np.random.default_rng(number)
    prompt = random.integers(len(SPECIAL), VOCABULARY, 5 + number % 20).astype(np.int32)
    return pb.GenerateSample(
        key=pb.SampleKey(iteration=0, sample=number, epoch=epoch),
        prompt=pack(prompt),
        random_key=number * 7919 + 1,
        max_response_tokens=tokens,
    )


@dataclass
class Worker:
    """A running worker and its newest session."""

    coordinator: ScriptedCoordinator
    process: asyncio.subprocess.Process
    session: ScriptedSession
    job: str
    commands: int = 100

    @property
    def address(self) -> str:
        return self.session.register.address

    def send(self, **command: Any) -> int:
        self.commands += 1
        self.session.send(self.commands, **command)
        return self.commands

    async def ask(self, **command: Any) -> pb.CommandDone:
        return await self.session.done(self.send(**command))

    def migrate(self, destination: str, *moves: tuple[int, int, int], seconds: float = 60) -> int:
        """`moves` are (sample, epoch, new epoch)."""
        samples = [
            pb.MigrateSample(key=pb.SampleKey(sample=number, epoch=epoch), new_epoch=new)
            for number, epoch, new in moves
        ]
        return self.send(migrate=pb.Migrate(destination=destination, samples=samples, timeout_seconds=seconds))

    async def generate(self, *samples: pb.GenerateSample) -> None:
        """Has decoded some tokens of each when this returns."""
        assert not (await self.ask(generate=pb.Generate(samples=samples))).HasField("failure")
        for one in samples:
            await self.session.first("progress", lambda told, key=one.key: told.key == key)

    async def finished(self, number: int, epoch: int) -> pb.FinishedSample:
        key = pb.SampleKey(sample=number, epoch=epoch)
        found: pb.FinishedSample = await self.session.first("finished", lambda told: told.key == key)
        return found

    async def idle(self) -> None:
        count = len([message for message in self.session.received if message.HasField("heartbeat")])
        await self.session.all("heartbeat", count + 1)
        beats = [message.heartbeat for message in self.session.received if message.HasField("heartbeat")]
        assert beats[-1].active_samples == 0

    async def next_session(self) -> None:
        self.session = await self.coordinator.session()


@dataclass
class Stage:
    """Two workers and what an undisturbed run gives."""

    folder: Path
    certificates: Path
    one: Worker
    other: Worker
    undisturbed: Callable[[pb.GenerateSample], Response]
    start: Callable[[int], Any]

    def check(self, told: pb.FinishedSample, tokens: int = RESPONSE) -> None:
        """Bitwise the undisturbed response."""
        wanted = self.undisturbed(sample(told.key.sample, tokens=tokens))
        assert unpack(told.tokens).tobytes() == wanted.tokens.tobytes()
        assert unpack(told.log_probabilities).tobytes() == wanted.log_probabilities.tobytes()
        assert sum(span.tokens for span in told.versions) == len(wanted.tokens)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("moves")
    write_long_policy(folder)
    now = datetime.now(UTC)
    certificates = folder / "certificates"
    new_authority("moves", now).issue([], now).write(certificates)
    environment = {Env.CERTIFICATES: str(certificates), Env.THREADS: "1"}
    async with AsyncExitStack() as stack:

        async def start(index: int) -> Worker:
            coordinator = ScriptedCoordinator()
            await coordinator.listen(certificates)
            stack.push_async_callback(coordinator.stop)
            log = folder / f"worker-{index}.log"
            process = await stack.enter_async_context(
                worker_process(coordinator.address, "generation", log, **environment, **{Env.INDEX: str(index)})
            )
            session = await coordinator.session()
            session.welcome(job(folder))
            worker = Worker(coordinator, process, session, job(folder))
            weights = pb.LoadWeights(model="actor", sources=[pb.WeightLocation(folder=str(folder / "policy"))])
            done = await worker.ask(become_generation=pb.BecomeGeneration(weights=weights))
            assert not done.HasField("failure"), done
            return worker

        one, other = await asyncio.gather(start(0), start(1))
        yield Stage(folder, certificates, one, other, oracle(folder / "policy"), start)


def oracle(policy: Path) -> Callable[[pb.GenerateSample], Response]:
    torch.set_num_threads(1)
    path, cpu = str(policy), torch.device("cpu")
    model = load_causal_lm(path, field="", dtype=torch.float32, device=cpu, attention="eager")
    engine = TorchEngine(
        model,
        load_tokenizer(path, ""),
        SamplingParameters(top_k=TOP_K),
        EngineLimits(SLOTS, 32, RESPONSE),
        deterministic=True,
    )
    known: dict[tuple[int, int], Response] = {}

    def undisturbed(one: pb.GenerateSample) -> Response:
        name = one.key.sample, one.max_response_tokens
        if name not in known:
            engine.submit([request_of(one)])
            while engine.held:
                for response in engine.step().finished:
                    known[name] = response
        return known[name]

    return undisturbed


# ---------------------------------------------------------------- as it should be


async def test_a_sample_moves_while_it_is_decoded_and_its_source_forgets_it(stage: Stage) -> None:
    await stage.one.generate(sample(0), sample(1))
    done = await stage.one.session.done(stage.one.migrate(stage.other.address, (0, 1, 2), (77, 1, 2)))
    moved, unknown = done.migrate.samples
    assert moved.moved, moved.why
    assert moved.key == pb.SampleKey(sample=0, epoch=1)
    tokens = len(unpack(moved.progress.tokens))
    assert moved.progress.key == pb.SampleKey(sample=0, epoch=2)
    assert (moved.progress.offset, moved.progress.versions[0].tokens) == (0, tokens)
    assert 0 < moved.paused_seconds <= moved.seconds
    positions = len(unpack(sample(0).prompt)) + tokens - 1
    assert moved.bytes == positions * 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, size, float32
    assert not unknown.moved
    assert unknown.why == "it is not held here"
    first = await stage.other.session.first("progress", lambda told: told.key == moved.progress.key)
    assert first == moved.progress
    stage.check(await stage.other.finished(0, 2))
    stage.check(await stage.one.finished(1, 1))
    await stage.one.idle()
    assert not [
        told for told in stage.one.session.received if told.finished.key.sample == 0 and told.HasField("finished")
    ]
    spans = [
        await session.first("span", lambda span: span.name == "migrate")
        for session in (stage.one.session, stage.other.session)
    ]
    assert [span.attributes["direction"] for span in spans] == ["out", "in"]
    assert {span.attributes["bytes"] for span in spans} == {str(moved.bytes)}


async def test_samples_move_there_and_back_and_one_that_waits_for_a_slot_moves_by_its_tokens(stage: Stage) -> None:
    numbers = range(10, 16)
    done = await stage.one.ask(generate=pb.Generate(samples=[sample(number) for number in numbers]))
    assert not done.HasField("failure")
    await stage.one.session.first("progress", lambda told: told.key.sample == 13)
    answer = await stage.one.session.done(stage.one.migrate(stage.other.address, (10, 1, 2), (15, 1, 2), (11, 1, 2)))
    assert [moved.moved for moved in answer.migrate.samples] == [True] * 3
    assert answer.migrate.samples[1].bytes == 0
    answer = await stage.other.session.done(stage.other.migrate(stage.one.address, (10, 2, 3)))
    back = answer.migrate.samples[0]
    if not back.moved:  # the slots it left were taken meanwhile
        assert "no slot is free" in back.why
    for number in (12, 13, 14):
        stage.check(await stage.one.finished(number, 1))
    stage.check(await (stage.one if back.moved else stage.other).finished(10, 3 if back.moved else 2))
    for number in (11, 15):
        stage.check(await stage.other.finished(number, 2))
    await stage.one.idle()
    await stage.other.idle()
