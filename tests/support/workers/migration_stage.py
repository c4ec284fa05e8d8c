"""Two real generation workers, each with a coordinator, and the undisturbed result of a sample.

With the torch engine the job is deterministic and every bit is compared. With vLLM every token is compared up to one
that float32 noise decides, and log-probabilities up to TOLERANCE.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.coordinator.scripted_coordinator import ScriptedCoordinator, ScriptedSession, worker_process
from tests.support.model_folders.models import SPECIAL, VOCABULARY, write_policy

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack, unpack
from rlhf_common.names import Env
from rlhf_common.samples import ResponsePart
from rlhf_operator.certificates import new_authority
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.sampling import WORDS_PER_BLOCK, uniforms
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.models.loading import load_causal_lm, load_tokenizer
from rlhf_workers.sample_codec import request_of

RESPONSE = 480
"""Tokens of a response."""
SLOTS = 4
TOP_K = 16
TILE = 16
"""Rows of a pass in deterministic mode."""
TOLERANCE = 1e-4
"""Tolerance of log-probabilities in float32."""
NOISE = 2e-5
"""Tolerance of cumulative probabilities and log-probabilities, which differ by about 1e-6 between batches of vLLM."""


def write_long_policy(folder: Path) -> Path:
    """Write a policy whose end-of-sequence token is never among the TOP_K most probable ones."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
    path = write_policy(folder / "policy", "llama", **sizes)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][1] = 0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def job(folder: Path, engine: str = "torch") -> str:
    spec = {
        "algorithm": {"grpo": {}},
        "deterministic": engine == "torch",
        "models": {
            "actor": {"path": str(folder / "policy")},
            "reward": {"function": {"file": str(folder / "reward.py")}},
        },
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"maxPromptTokens": 32, "maxResponseTokens": RESPONSE, "topK": TOP_K},
        "generation": {"maxBatchSize": SLOTS, "engine": engine},
    }
    return json.dumps(
        {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "moves"}, "spec": spec}
    )


def sample(number: int, attempt: int = 1, tokens: int = RESPONSE) -> pb.GenerateSample:
    random = np.random.default_rng(number)
    prompt = random.integers(len(SPECIAL), VOCABULARY, 5 + number % 20).astype(np.int32)
    return pb.GenerateSample(
        key=pb.SampleKey(iteration=0, sample=number, attempt=attempt),
        prompt=pack(prompt),
        random_key=number * 7919 + 1,
        max_response_tokens=tokens,
    )


def rounding_decides(policy: Path, asked: pb.GenerateSample, drawn: np.ndarray[Any, np.dtype[np.int32]]) -> bool:
    """Return whether the token after `drawn` is so close to a boundary of the distribution that float32 noise moves it.

    Kernels of some processors sum differently in a batch than alone, which vLLM does not prevent (docs/determinism.md).
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
    sequence = torch.from_numpy(np.concatenate([unpack(asked.prompt), drawn]).astype(np.int64))[None]
    with torch.no_grad():
        scores = model(sequence).logits[0, -1].log_softmax(dim=-1)
    ordered, tokens = scores.sort(descending=True, stable=True)
    weights = torch.zeros_like(scores).index_copy(0, tokens[:TOP_K], ordered[:TOP_K].exp())
    place = len(drawn)
    uniform = uniforms(asked.random_key, place - place % WORDS_PER_BLOCK, WORDS_PER_BLOCK)[place % WORDS_PER_BLOCK]
    to_boundary = float((weights.cumsum(dim=0) / weights.sum() - float(uniform)).abs().min())
    return min(to_boundary, float(ordered[TOP_K - 1] - ordered[TOP_K])) < NOISE


@dataclass
class StageWorker:
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

    def migrate(self, destination: str, *moves: tuple[int, int, int], seconds: float = 180) -> int:
        """Send a Migrate; `moves` are (sample, attempt, new attempt)."""
        samples = [
            pb.MigrateSample(key=pb.SampleKey(sample=number, attempt=attempt), new_attempt=new)
            for number, attempt, new in moves
        ]
        return self.send(migrate=pb.Migrate(destination=destination, samples=samples, timeout_seconds=seconds))

    async def generate(self, *samples: pb.GenerateSample) -> None:
        """Start samples; return when some tokens of each are decoded."""
        assert not (await self.ask(generate=pb.Generate(samples=samples))).HasField("failure")
        keys = [sample.key for sample in samples]
        for key in keys:
            await self.session.first("progress", partial(_is_of, key))

    async def withdraw(self, *numbers: int) -> None:
        keys = [pb.SampleKey(sample=number, attempt=1) for number in numbers]
        assert len((await self.ask(withdraw=pb.Withdraw(keys=keys))).withdraw.samples) == len(numbers)

    async def finished(self, number: int, attempt: int) -> pb.FinishedSample:
        key = pb.SampleKey(sample=number, attempt=attempt)
        result: pb.FinishedSample = await self.session.first("finished", lambda message: message.key == key)
        return result

    async def idle(self) -> None:
        """Wait for a new heartbeat that lists no sample."""
        before = [message.heartbeat for message in self.session.received if message.HasField("heartbeat")]
        await self.session.all("heartbeat", sum(map(_is_idle, before)) + 1, _is_idle)

    async def next_session(self) -> None:
        self.session = await self.coordinator.session()


@dataclass
class MigrationStage:
    """Two workers and the undisturbed results."""

    folder: Path
    certificates: Path
    first: StageWorker
    other: StageWorker
    undisturbed: Callable[[pb.GenerateSample], ResponsePart]
    start: Callable[[int], Any]
    exact: bool

    def check(self, message: pb.FinishedSample, tokens: int = RESPONSE) -> None:
        """Assert the undisturbed response, bitwise if the stage is `exact`."""
        wanted = self.undisturbed(sample(message.key.sample, tokens=tokens))
        drawn, got = unpack(message.tokens), unpack(message.log_probabilities)
        assert len(drawn) == len(wanted.tokens) == sum(span.tokens for span in message.versions)
        same = int((drawn != wanted.tokens).argmax()) if (drawn != wanted.tokens).any() else len(drawn)
        if same < len(drawn):
            assert not self.exact
            assert rounding_decides(self.folder / "policy", sample(message.key.sample), drawn[:same])
        assert got.tobytes() == wanted.log_probabilities.tobytes() or not self.exact
        assert np.abs(got - wanted.log_probabilities)[:same].max(initial=0.0) < TOLERANCE


@asynccontextmanager
async def set_up(folder: Path, engine: str = "torch") -> AsyncIterator[MigrationStage]:
    """Start two workers that have the policy and decode."""
    write_long_policy(folder)
    now = datetime.now(UTC)
    certificates = folder / "certificates"
    new_authority("moves", now).issue([], now).write(certificates)
    environment = {Env.CERTIFICATES: str(certificates), Env.THREADS: "1"}
    async with AsyncExitStack() as stack:

        async def start(index: int) -> StageWorker:
            coordinator = ScriptedCoordinator()
            await coordinator.listen(certificates)
            stack.push_async_callback(coordinator.stop)
            log = folder / f"worker-{index}.log"
            process = await stack.enter_async_context(
                worker_process(coordinator.address, "generation", log, **environment, **{Env.INDEX: str(index)})
            )
            session = await coordinator.session()
            session.welcome(job(folder, engine))
            worker = StageWorker(coordinator, process, session, job(folder, engine))
            weights = pb.LoadWeights(model="actor", sources=[pb.WeightLocation(folder=str(folder / "policy"))])
            done = await worker.ask(become_generation=pb.BecomeGeneration(weights=weights))
            assert not done.HasField("failure"), done
            return worker

        first_worker, other = await asyncio.gather(start(0), start(1))
        yield MigrationStage(
            folder, certificates, first_worker, other, oracle(folder / "policy"), start, engine == "torch"
        )


def oracle(policy: Path) -> Callable[[pb.GenerateSample], ResponsePart]:
    torch.set_num_threads(1)
    path, cpu = str(policy), torch.device("cpu")
    model = load_causal_lm(path, field="", dtype=torch.float32, device=cpu, attention="eager")
    engine = TorchEngine(
        model,
        load_tokenizer(path, ""),
        SamplingParameters(top_k=TOP_K),
        EngineLimits(TILE, 32, RESPONSE),
        deterministic=True,
    )
    cached: dict[tuple[int, int], ResponsePart] = {}

    def undisturbed(request: pb.GenerateSample) -> ResponsePart:
        first, tokens = request.key.sample, request.max_response_tokens
        if (first, tokens) not in cached:  # the later ones cost nothing, because a pass has that many rows
            engine.submit([request_of(sample(first + more, tokens=tokens)) for more in range(TILE)])
            while engine.in_flight:
                cached.update({(message.key.sample, tokens): message for message in engine.step().finished})
        return cached[first, tokens]

    return undisturbed


async def caught(stage: MigrationStage, first: int, reached: asyncio.Event, address: str) -> tuple[int, int]:
    """Move samples one after the other until one reaches `reached` before its end; return (sample, command)."""
    for number in range(first, first + 5):
        await stage.first.generate(sample(number))
        identifier = stage.first.migrate(address, (number, 1, 2))
        ends = [asyncio.ensure_future(reached.wait()), asyncio.ensure_future(stage.first.session.done(identifier))]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if reached.is_set():
            return number, identifier
    raise AssertionError("every sample was finished before it got so far")


def _is_idle(beat: pb.Heartbeat) -> bool:
    return beat.active_samples == 0


def _is_of(key: pb.SampleKey, progress: pb.SampleProgress) -> bool:
    return progress.key == key
