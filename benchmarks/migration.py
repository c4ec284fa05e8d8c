"""Moving samples between two real worker processes, with their KV caches and by their tokens alone.

    python benchmarks/migration.py --json

Each worker is pinned to a core. Reported for every response length, fast and deterministic: bytes, milliseconds and
pause of a KV move and the decode steps that the pause costs; milliseconds and steps lost when the source gives the
sample back and the destination goes on from its tokens (prefill, or replay in deterministic mode); what the planner
predicts for both from the workers' own Measure, before and after it has seen these moves; and the length at which they
cross, measured and predicted. All traffic is mutual TLS over loopback. The last line of --json is one object.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.integration.scripted_coordinator import ScriptedCoordinator, ScriptedSession, worker_process
from tests.models import SPECIAL, VOCABULARY, write_policy

from rlhf_api import control_pb2 as pb
from rlhf_api.arrays import pack, unpack
from rlhf_api.names import Env
from rlhf_operator.certificates import new_authority
from rlhf_operator.coordinator.world.fusion_state import LINK_BYTES_PER_SECOND
from rlhf_planner.inter_stage.costs import Observed, StageCosts
from rlhf_planner.inter_stage.fitted import StepTime
from rlhf_workers.device import device_name

PROMPT = 16
TOP_K = 16
"""The end-of-sequence token is never among so many most probable ones: a response is as long as it should be."""
MARGIN = 512
"""Response tokens beyond the longest length: the sample grows while it goes to and fro."""
WARM_UP = 8


@dataclass
class Point:
    """Medians over the repeats, for a sample of `tokens` tokens when it moved."""

    tokens: int
    kv_bytes: int
    kv_ms: float
    kv_paused_ms: float
    kv_steps_lost: float
    recompute_ms: float
    recompute_steps_lost: float
    predicted_kv_ms: float = 0.0
    learned_kv_ms: float = 0.0
    predicted_recompute_ms: float = 0.0


class Worker:
    """A worker process and its session."""

    def __init__(self, session: ScriptedSession) -> None:
        self.session = session
        self.commands = 0

    async def ask(self, **command: Any) -> pb.CommandDone:
        self.commands += 1
        self.session.send(self.commands, **command)
        done = await self.session.done(self.commands)
        if done.HasField("failure"):
            raise RuntimeError(done.failure.message)
        return done


def write_files(folder: Path, arguments: argparse.Namespace) -> None:
    """Policy and certificates."""
    sizes = {
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.hidden * 2,
        "num_hidden_layers": arguments.layers,
        "head_dim": arguments.hidden // 4,
        "max_position_embeddings": 4096,
    }
    path = write_policy(folder / "policy", "llama", **sizes)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][1] = 0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    now = datetime.now(UTC)
    new_authority("migration", now).issue([], now).write(folder / "certificates")


def job(folder: Path, longest: int, deterministic: bool) -> str:
    spec = {
        "algorithm": {"grpo": {}},
        "deterministic": deterministic,
        "models": {
            "actor": {"path": str(folder / "policy")},
            "reward": {"function": {"file": str(folder / "reward.py")}},
        },
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"maxPromptTokens": PROMPT, "maxResponseTokens": longest + MARGIN, "topK": TOP_K},
        "generation": {"maxBatchSize": 16},
    }
    metadata = {"name": "migration"}
    return json.dumps({"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": metadata, "spec": spec})


async def start(stack: AsyncExitStack, folder: Path, index: int, manifest: str) -> Worker:
    """A generation worker with its policy loaded, pinned to core `index`."""
    certificates = folder / "certificates"
    coordinator = ScriptedCoordinator()
    await coordinator.listen(certificates)
    stack.push_async_callback(coordinator.stop)
    environment = {Env.CERTIFICATES: str(certificates), Env.THREADS: "1", Env.INDEX: str(index)}
    log = folder / f"worker-{index}.log"
    process = await stack.enter_async_context(worker_process(coordinator.address, "generation", log, **environment))
    session = await coordinator.session()
    os.sched_setaffinity(process.pid, {index % (os.cpu_count() or 1)})
    session.welcome(manifest)
    worker = Worker(session)
    weights = pb.LoadWeights(model="actor", sources=[pb.WeightLocation(folder=str(folder / "policy"))])
    await worker.ask(become_generation=pb.BecomeGeneration(weights=weights))
    return worker


def sample(number: int, response: int) -> pb.GenerateSample:
    random = np.random.default_rng(number)
    return pb.GenerateSample(
        key=pb.SampleKey(iteration=0, sample=number, epoch=1),
        prompt=pack(random.integers(len(SPECIAL), VOCABULARY, PROMPT).astype(np.int32)),
        random_key=number + 1,
        max_response_tokens=response,
    )


async def told(worker: Worker, number: int, tokens: int) -> None:
    """The sample has so many tokens on this worker."""
    await worker.session.first(
        "progress", lambda told: told.key.sample == number and told.offset + told.tokens.shape[0] >= tokens
    )


async def by_cache(source: Worker, destination: Worker, key: pb.SampleKey) -> pb.MigratedSample:
    """Moves the sample, which is decoded on meanwhile."""
    move = pb.MigrateSample(key=key, new_epoch=key.epoch + 1)
    address = destination.session.register.address
    answer = await source.ask(migrate=pb.Migrate(destination=address, samples=[move], timeout_seconds=60))
    (result,) = answer.migrate.samples
    if not result.moved:
        raise RuntimeError(f"the sample did not move: {result.why}")
    return result


async def by_tokens(
    source: Worker, destination: Worker, one: pb.GenerateSample, known: pb.SampleProgress, number: int
) -> float:
    """Seconds from asking for a copy of the sample, which is decoded, until another worker has its next token."""
    copy = pb.GenerateSample()
    copy.CopyFrom(one)
    copy.key.sample = number
    _give(copy, known)
    await source.ask(generate=pb.Generate(samples=[copy]))
    await told(source, number, known.tokens.shape[0] + 1)
    started = time.perf_counter()
    answer = await source.ask(withdraw=pb.Withdraw(keys=[copy.key]))
    (progress,) = answer.withdraw.samples
    _give(copy, progress)
    copy.key.epoch += 1
    copy.max_response_tokens = progress.tokens.shape[0] + 1
    await destination.ask(generate=pb.Generate(samples=[copy]))
    await destination.session.first("finished", lambda told: told.key == copy.key)
    return time.perf_counter() - started


def _give(sample: pb.GenerateSample, known: pb.SampleProgress) -> None:
    """The sample goes on after these tokens."""
    for name in ("tokens", "log_probabilities"):
        getattr(sample, name).CopyFrom(getattr(known, name))
    del sample.versions[:]
    sample.versions.extend(known.versions)


async def measure(folder: Path, arguments: argparse.Namespace, deterministic: bool) -> dict[str, Any]:
    """All points of one mode: one sample that goes to and fro while it grows, and then copies of it, each made from the
    tokens that it had at a move."""
    points: list[Point] = []
    async with AsyncExitStack() as stack:
        longest = max(arguments.tokens)
        manifest = job(folder, longest, deterministic)
        here, there = [await start(stack, folder, index, manifest) for index in range(2)]
        costs = stage_costs((await there.ask(measure=pb.Measure(role="generation"))).measure.generation)
        step = costs.decode_seconds(1, PROMPT + statistics.mean(arguments.tokens))
        one, copies = sample(0, longest + MARGIN), 1
        key = one.key
        await here.ask(generate=pb.Generate(samples=[one]))
        moves: list[list[pb.MigratedSample]] = []
        for tokens in (WARM_UP, *arguments.tokens):
            await told(here, 0, tokens)
            moves.append([])
            for _ in range(arguments.repeats):
                moves[-1].append(await by_cache(here, there, key))
                here, there, key = there, here, moves[-1][-1].progress.key
        await here.ask(withdraw=pb.Withdraw(keys=[key]))
        for ones in moves:
            recomputes = []
            for move in ones:
                recomputes.append(await by_tokens(here, there, one, move.progress, copies))
                copies += 1
            points.append(point(ones, recomputes, step))
    return predict(points[1:], costs, step) | {"deterministic": deterministic}


def point(moves: list[pb.MigratedSample], recomputes: list[float], step: float) -> Point:
    """Medians of one length; `step` is a decode step in seconds."""
    paused = statistics.median(move.paused_seconds for move in moves)
    return Point(
        tokens=round(statistics.median(len(unpack(move.progress.tokens)) for move in moves)),
        kv_bytes=round(statistics.median(move.bytes for move in moves)),
        kv_ms=1e3 * statistics.median(move.seconds for move in moves),
        kv_paused_ms=1e3 * paused,
        kv_steps_lost=paused / step,
        recompute_ms=1e3 * statistics.median(recomputes),
        recompute_steps_lost=statistics.median(recomputes) / step,
    )


def stage_costs(measured: pb.GenerationCosts) -> StageCosts:
    """The planner's view of the worker's own measurement."""
    return StageCosts.measured(
        decode=[StepTime(cost.batch, cost.tokens, cost.seconds) for cost in measured.decode],
        prefill=[StepTime(cost.batch, cost.tokens, cost.seconds) for cost in measured.prefill],
        max_batch_size=measured.max_batch_size,
        kv_bytes_per_token=measured.kv_bytes_per_token,
        bandwidth=LINK_BYTES_PER_SECOND,
        replays=measured.replays,
    )


def predict(points: list[Point], costs: StageCosts, step: float) -> dict[str, Any]:
    """Adds what the planner says of every point and of the crossover: at the start of a job, and once it saw moves."""
    moves = [Observed("transfer", 1, 1, PROMPT + point.tokens, point.kv_ms / 1e3) for point in points]
    learned = costs.refined(moves)
    for point in points:
        keys = PROMPT + point.tokens
        point.predicted_kv_ms, point.learned_kv_ms = 1e3 * costs.kv_seconds(keys), 1e3 * learned.kv_seconds(keys)
        point.predicted_recompute_ms = 1e3 * costs.rebuild_seconds(PROMPT, point.tokens, 1)
    at = range(1, 2 * max(point.tokens for point in points))

    def crosses(by: StageCosts) -> int | None:
        """Response tokens from which a move with the cache is faster."""
        return next((n for n in at if by.kv_seconds(PROMPT + n) < by.rebuild_seconds(PROMPT, n, 1)), None)

    return {
        "step_ms": 1e3 * step,
        "kv_bytes_per_token": costs.kv_bytes_per_token,
        "transfer_ratio": learned.scale["transfer"],
        "crossover_tokens": crossover(points),
        "predicted_crossover_tokens": crosses(costs),
        "learned_crossover_tokens": crosses(learned),
        "points": [asdict(point) for point in points],
    }


def crossover(points: list[Point]) -> float | None:
    """Response tokens from which a KV move is faster than recomputing, by straight lines between points.

    None: at no measured length; the first length when it is faster at all of them.
    """
    gains = [point.recompute_ms - point.kv_ms for point in points]
    if gains[0] > 0:
        return float(points[0].tokens)
    for (one, gain), (other, next_gain) in zip(
        zip(points, gains, strict=True), list(zip(points, gains, strict=True))[1:], strict=False
    ):
        if gain <= 0 < next_gain:
            return one.tokens + (other.tokens - one.tokens) * -gain / (next_gain - gain)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, arguments)
        modes = [asyncio.run(measure(folder, arguments, deterministic)) for deterministic in (False, True)]
    for mode in modes:
        print("deterministic" if mode["deterministic"] else "fast", f"(a decode step: {mode['step_ms']:.2f} ms)")
        for point in mode["points"]:
            print(
                "{tokens:6} tokens  KV {kv_bytes:10,} bytes {kv_ms:7.1f} ms (predicted {predicted_kv_ms:6.1f}, learned "
                "{learned_kv_ms:6.1f}), paused {kv_paused_ms:5.1f} ms = {kv_steps_lost:4.1f} steps; by tokens "
                "{recompute_ms:7.1f} ms (predicted {predicted_recompute_ms:7.1f}) = {recompute_steps_lost:6.1f} "
                "steps".format(**point)
            )
        print(
            f"  KV is faster from {mode['crossover_tokens']} tokens; predicted {mode['predicted_crossover_tokens']}, "
            f"after these moves {mode['learned_crossover_tokens']}"
        )
    if arguments.json:
        names = ("hidden", "layers", "tokens", "repeats")
        setting = {"device": device_name(torch.device("cpu"))} | {name: getattr(arguments, name) for name in names}
        print(json.dumps(setting | {"modes": modes}))


if __name__ == "__main__":
    main()
