"""Measures moves of samples between two real worker processes, with their KV caches and by their tokens.

    python benchmarks/migration.py --json

Each worker is pinned to a core. Samples of every length move with their caches (bytes, milliseconds, and the pause in
which no worker decodes them) and by their tokens (milliseconds from returning the sample to its next token). The
results are compared with the planner's predictions, from the workers' own Measure and after it has observed these
moves, one repeat per iteration. Also reported: the length from which the cache costs less, measured and predicted.
Settings: two workers on one machine; the same with a slow link between them and to the coordinator; and a
deterministic job. All traffic is mutual TLS over loopback. The last line of --json is one object.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.move_costs import Moved, lines, summary
from benchmarks.slow_link import SlowLink
from tests.support.coordinator.scripted_coordinator import ScriptedCoordinator, ScriptedSession, worker_process
from tests.support.model_folders.models import SPECIAL, VOCABULARY, write_policy

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack, unpack
from rlhf_common.names import Env
from rlhf_coordinator.fusion import learning
from rlhf_coordinator.state.fusion_state import LINK_BYTES_PER_SECOND
from rlhf_operator.certificates import new_authority
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.learned_costs import ObservedWork, refined
from rlhf_workers.devices.device import device_name

PROMPT = 16
TOP_K = 16
"""The end-of-sequence token is never among so many most probable ones, so responses reach their intended length."""
MARGIN = 512
"""Response tokens beyond the longest length, because a sample grows while it moves."""
QUIET_SECONDS = 0.3
"""After so many seconds without progress the next token is reported immediately."""
NO_DELAY = 0.0


@dataclass(frozen=True)
class MigrationSetting:
    """Conditions of a measurement."""

    name: str
    tokens: list[int]
    repeats: int
    deterministic: bool = False
    delay: float = NO_DELAY
    """Additional latency in seconds between processes."""
    rate: float = 0.0
    """Bytes per second between the workers; 0 means unlimited."""


class WorkerProcess:
    """A worker process, its session, and its address for other workers; its coordinator has the same latency."""

    def __init__(self, session: ScriptedSession, address: str, delay: float) -> None:
        self.session, self.address, self.delay = session, address, delay
        self.commands = 0
        self._seen = 0

    async def ask(self, **command: Any) -> pb.CommandDone:
        self.commands += 1
        number = self.commands
        await asyncio.sleep(self.delay)
        self.session.send(number, **command)
        done = await self.session.done(number)
        await asyncio.sleep(self.delay)
        if done.HasField("failure"):
            raise RuntimeError(done.failure.message)
        return done

    def observed(self) -> list[ObservedWork]:
        """Return the decode steps and rebuilt caches that the worker reported since the last call."""
        new, self._seen = self.session.received[self._seen :], len(self.session.received)
        observations = [message.observation for message in new if message.HasField("observation")]
        decoded = [item for item in observations if item.decode.rows_per_step]
        rebuilt = [item for item in observations if item.HasField("rebuild")]
        return [*map(learning.decode_work, decoded), *map(learning.rebuild_work, rebuilt)]


def write_files(folder: Path, arguments: argparse.Namespace) -> None:
    """Write the policy and certificates."""
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


def job(folder: Path, response: int, deterministic: bool) -> str:
    spec = {
        "algorithm": {"grpo": {}},
        "deterministic": deterministic,
        "models": {
            "actor": {"path": str(folder / "policy")},
            "reward": {"function": {"file": str(folder / "reward.py")}},
        },
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"maxPromptTokens": PROMPT, "maxResponseTokens": response, "topK": TOP_K},
        "generation": {"maxBatchSize": 16},
    }
    metadata = {"name": "migration"}
    return json.dumps({"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": metadata, "spec": spec})


async def start(
    stack: AsyncExitStack, folder: Path, index: int, manifest: str, setting: MigrationSetting
) -> WorkerProcess:
    """Start a generation worker with its policy loaded, pinned to core `index`."""
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
    address = session.register.address
    if setting.rate:
        link = SlowLink(address, setting.delay, setting.rate)
        await link.listen(stack)
        address = link.address
    worker = WorkerProcess(session, address, setting.delay)
    weights = pb.LoadWeights(model="actor", sources=[pb.WeightLocation(folder=str(folder / "policy"))])
    await worker.ask(become_generation=pb.BecomeGeneration(weights=weights))
    return worker


async def began(worker: WorkerProcess, number: int, tokens: int, limit: int) -> pb.GenerateSample:
    """Return a sample with `tokens` known tokens, after the worker has decoded one more."""
    random = np.random.default_rng(number)
    sample = pb.GenerateSample(
        key=pb.SampleKey(iteration=0, sample=number, attempt=1),
        prompt=pack(random.integers(len(SPECIAL), VOCABULARY, PROMPT).astype(np.int32)),
        random_key=number + 1,
        max_response_tokens=limit,
        tokens=pack(random.integers(len(SPECIAL), VOCABULARY, tokens).astype(np.int32)),
        log_probabilities=pack(np.full(tokens, -1.0, np.float32)),
        versions=[pb.VersionSpan(version=0, tokens=tokens)],
    )
    await asyncio.sleep(QUIET_SECONDS)
    await worker.ask(generate=pb.Generate(samples=[sample]))
    await worker.session.first("progress", lambda message: message.key == sample.key and message.tokens.shape[0] > 0)
    return sample


async def by_cache(
    source: WorkerProcess, destination: WorkerProcess, sample: pb.GenerateSample
) -> tuple[pb.MigratedSample, float]:
    """Move the sample while it is decoded; return it, and the seconds until the coordinator knows."""
    move = pb.MigrateSample(key=sample.key, new_attempt=sample.key.attempt + 1)
    started = time.perf_counter()
    answer = await source.ask(
        migrate=pb.Migrate(destination=destination.address, samples=[move], timeout_seconds=60)
    )  # fmt: skip
    seconds = time.perf_counter() - started
    (result,) = answer.migrate.samples
    if not result.moved:
        raise RuntimeError(f"the sample did not move: {result.why}")
    await destination.ask(withdraw=pb.Withdraw(keys=[result.progress.key]))
    return result, seconds


async def by_tokens(
    source: WorkerProcess, destination: WorkerProcess, sample: pb.GenerateSample
) -> tuple[int, float, float]:
    """Return (tokens, seconds from the source's stop to the next token on the other worker, seconds of returning)."""
    started = time.perf_counter()
    answer = await source.ask(withdraw=pb.Withdraw(keys=[sample.key]))
    reported = time.perf_counter() - started
    (progress,) = answer.withdraw.samples
    for name in ("tokens", "log_probabilities"):
        getattr(sample, name).CopyFrom(getattr(progress, name))
    del sample.versions[:]
    sample.versions.extend(progress.versions)
    sample.key.attempt += 1
    sample.max_response_tokens = progress.tokens.shape[0] + 1

    async def ended() -> float:
        await destination.session.first("finished", lambda message: message.key == sample.key)
        return time.perf_counter()

    _, end = await asyncio.gather(destination.ask(generate=pb.Generate(samples=[sample])), ended())
    return progress.tokens.shape[0], end - started - source.delay, reported


async def measure(folder: Path, setting: MigrationSetting) -> dict[str, Any]:
    """Run all moves of one setting."""
    longest = max(setting.tokens) + MARGIN
    moves: list[Moved] = []
    async with AsyncExitStack() as stack:
        manifest = job(folder, longest, setting.deterministic)
        workers = [await start(stack, folder, index, manifest, setting) for index in range(2)]
        await both(workers, setting, -1, min(setting.tokens), longest, [])  # slow the first time
        costs = stage_costs((await workers[1].ask(measure=pb.Measure(role="generation"))).measure.generation)
        learned = costs
        for worker in workers:
            worker.observed()
        for repeat in range(setting.repeats):
            seen: list[ObservedWork] = []
            for tokens in setting.tokens:
                moves.append(await both(workers, setting, repeat, tokens, longest, seen, costs.kv_bytes_per_token))
                workers.reverse()
            await asyncio.sleep(QUIET_SECONDS)  # wait for the last spans
            learned = refined(learned, [*seen, *workers[0].observed(), *workers[1].observed()])
    result: dict[str, Any] = summary(moves, costs, learned, PROMPT)
    return {"name": setting.name, "deterministic": setting.deterministic} | result


async def both(
    workers: list[WorkerProcess],
    setting: MigrationSetting,
    repeat: int,
    tokens: int,
    longest: int,
    seen: list[ObservedWork],
    bytes_per_token: float = 0.0,
) -> Moved:
    """Move a sample of `tokens` tokens with its cache, and one by its tokens; `seen` gets the coordinator's
    observations."""
    source, destination = workers
    number = 2 * ((repeat + 1) * len(setting.tokens) + setting.tokens.index(tokens))
    by_kv, seconds = await by_cache(source, destination, await began(source, number, tokens, longest))
    seen += learning.transfer_work([by_kv], bytes_per_token, seconds)
    bare, lost, reported = await by_tokens(source, destination, await began(source, number + 1, tokens, longest))
    seen.append(ObservedWork("command", 1, 1, 1, reported))
    moved_tokens = len(unpack(by_kv.progress.tokens))
    return Moved(tokens, repeat, moved_tokens, by_kv.bytes, seconds, by_kv.paused_seconds, bare, lost)


def stage_costs(measured: pb.GenerationCosts) -> StageCosts:
    """Return the planner's costs from the worker's own measurement."""
    return StageCosts.measured(
        decode=[StepTime(cost.batch, cost.tokens, cost.seconds) for cost in measured.decode],
        prefill=[StepTime(cost.batch, cost.tokens, cost.seconds) for cost in measured.prefill],
        max_batch_size=measured.max_batch_size,
        kv_bytes_per_token=measured.kv_bytes_per_token,
        bandwidth=LINK_BYTES_PER_SECOND,
        replays=measured.replays,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--replayed-tokens", type=int, nargs="+", default=[4, 16, 64, 256], help="deterministic job")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=5.0, help="of the slow link, one way")
    parser.add_argument("--mb-per-second", type=float, default=125.0, help="of the slow link")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rate = f"{arguments.mb_per_second:g} MB/s, {arguments.delay_ms:g} ms one way"
    settings = [
        MigrationSetting("one machine", arguments.tokens, arguments.repeats),
        MigrationSetting(
            f"a link of {rate}", arguments.tokens, arguments.repeats,
            delay=arguments.delay_ms / 1e3, rate=1e6 * arguments.mb_per_second,
        ),
        MigrationSetting("deterministic job", arguments.replayed_tokens, min(arguments.repeats, 3), deterministic=True),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, arguments)
        results = []
        for setting in settings:
            results.append(asyncio.run(measure(folder, setting)))
            print(*lines(results[-1]), sep="\n", flush=True)
    if arguments.json:
        names = ("hidden", "layers", "tokens", "repeats", "delay_ms", "mb_per_second")
        common = {"device": device_name(torch.device("cpu"))} | {name: getattr(arguments, name) for name in names}
        print(json.dumps(common | {"settings": results}))


if __name__ == "__main__":
    main()
