"""Measures tokens per second of the engines, alone and in their workers, on the same requests of three kinds.

    python benchmarks/engines.py --json [--rounds 3] [--workloads short long-tailed shared-prefix]

Ways to decode: bare vLLM (`LLM.generate`), a generation worker with vLLM, the torch engine alone, the same with fused
passes, a worker with it, and transformers.generate. Each is a process with the same number of threads and a random
Llama in float32 with 10.7 million parameters. Workers are real ones: requests and tokens use gRPC with mutual TLS,
timed from sending the samples until all are reported finished. All ways decode every batch in turn. Prompts are new in
each batch, and no token ends a response.

Reported for each way, as medians over rounds: tokens per second by the clock and by processor seconds, which are
steadier on a shared machine, and the ratio to the first way in the same round. Also seconds to start, and seconds of a
weight update from a folder by size. The last line of --json is one object.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.process_tree import cpu_seconds
from tests.support.coordinator.scripted_coordinator import ScriptedCoordinator, ScriptedSession, worker_process

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_common.names import Env
from rlhf_operator.certificates import new_authority
from rlhf_workers.devices.device import device_name

VOCABULARY: Final = 96
HIDDEN: Final = 384
START_SECONDS: Final = 900.0
BATCH_SECONDS: Final = 900.0
"""Time-out of a batch on a shared machine."""
POLL_SECONDS: Final = 0.01
"""Interval between polls of a worker's reports."""
WORKLOADS: Final = ("short", "long-tailed", "shared-prefix")

Batch = list[tuple[list[int], int]]


@dataclass(frozen=True)
class Taken:
    """Time of one batch."""

    seconds: float
    cpu_seconds: float


class DecodingWay(Protocol):
    """A way to decode batches."""

    start_seconds: float

    async def decode(self, batch: Batch) -> Taken:
        """Decode one batch."""


class ProcessWay:
    """An engine in a process that does nothing else."""

    def __init__(self) -> None:
        self.start_seconds = 0.0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, stack: AsyncExitStack, wanted: dict[str, Any], arguments: argparse.Namespace) -> None:
        """Start it, and wait until it can decode."""
        began = time.perf_counter()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("engines_process.py")),
            json.dumps(wanted),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if arguments.verbose else asyncio.subprocess.DEVNULL,
            env=os.environ | _environment(arguments),
            limit=2**24,
        )
        stack.callback(self._process.kill)
        await self._answer(START_SECONDS)
        self.start_seconds = time.perf_counter() - began

    async def decode(self, batch: Batch) -> Taken:
        """See DecodingWay."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(batch).encode() + b"\n")
        return Taken(**await self._answer(BATCH_SECONDS))

    async def _answer(self, patience: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), patience)
        if not line:
            raise SystemExit(f"a process ended with {await self._process.wait()}; --verbose shows what it said")
        return dict(json.loads(line))


class WorkerWay:
    """A generation worker of the project, with a scripted coordinator."""

    def __init__(self, session: ScriptedSession, process: int) -> None:
        self.start_seconds = 0.0
        self._session, self._process = session, process
        self._commands = self._batches = 0

    async def ask(self, **command: Any) -> pb.CommandDone:
        """Send a command and wait until it is done."""
        self._commands += 1
        self._session.send(self._commands, **command)
        done = await self._session.done(self._commands)
        if done.HasField("failure"):
            raise RuntimeError(done.failure.message)
        return done

    async def decode(self, batch: Batch) -> Taken:
        """See DecodingWay."""
        self._batches += 1
        self._session.received.clear()
        samples = [
            pb.GenerateSample(
                key=pb.SampleKey(iteration=self._batches, sample=number, attempt=1),
                prompt=pack(np.array(prompt, np.int32)),
                random_key=number,
                max_response_tokens=limit,
            )
            for number, (prompt, limit) in enumerate(batch)
        ]
        began, cpu = time.perf_counter(), cpu_seconds(self._process)
        await self.ask(generate=pb.Generate(samples=samples))
        lengths = await asyncio.wait_for(self._finished(len(batch)), BATCH_SECONDS)
        taken = Taken(time.perf_counter() - began, cpu_seconds(self._process) - cpu)
        wanted = {number: limit for number, (_, limit) in enumerate(batch)}
        if lengths != wanted:
            raise SystemExit(f"asked for {wanted} tokens, got {lengths}")
        return taken

    async def _finished(self, count: int) -> dict[int, int]:
        lengths: dict[int, int] = {}
        seen = 0
        while len(lengths) < count:
            new, seen = self._session.received[seen:], len(self._session.received)
            for message in new:
                if message.HasField("finished"):
                    lengths[message.finished.key.sample] = message.finished.tokens.shape[0]
            await asyncio.sleep(POLL_SECONDS)
        return lengths

    async def load(self, folder: Path, version: int) -> float:
        """Return the seconds of replacing all weights by those of a folder."""
        began = time.perf_counter()
        sources = [pb.WeightLocation(folder=str(folder))]
        await self.ask(load_weights=pb.LoadWeights(model="actor", version=version, sources=sources))
        return time.perf_counter() - began


async def start_worker(
    stack: AsyncExitStack, folder: Path, engine: str, layers: int, arguments: argparse.Namespace
) -> WorkerWay:
    """Start a worker with the policy of `layers` layers."""
    certificates, policy = folder / "certificates", folder / f"policy-{layers}"
    coordinator = ScriptedCoordinator()
    await coordinator.listen(certificates)
    stack.push_async_callback(coordinator.stop)
    began = time.perf_counter()
    environment = {**_environment(arguments), Env.CERTIFICATES: str(certificates), Env.THREADS: str(arguments.threads)}
    log = folder / f"{engine}-{layers}.log"
    process = await stack.enter_async_context(worker_process(coordinator.address, "generation", log, **environment))
    session = await coordinator.session()
    session.welcome(_manifest(folder, policy, engine, arguments))
    worker = WorkerWay(session, process.pid)
    weights = pb.LoadWeights(model="actor", sources=[pb.WeightLocation(folder=str(policy))])
    await worker.ask(become_generation=pb.BecomeGeneration(weights=weights))
    worker.start_seconds = time.perf_counter() - began
    return worker


def _manifest(folder: Path, policy: Path, engine: str, arguments: argparse.Namespace) -> str:
    spec = {
        "algorithm": {"grpo": {}},
        "models": {"actor": {"path": str(policy)}, "reward": {"function": {"file": str(folder / "reward.py")}}},
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"maxPromptTokens": arguments.prefix, "maxResponseTokens": arguments.response},
        "generation": {"engine": engine, "maxBatchSize": arguments.slots},
    }
    metadata = {"name": "engines"}
    return json.dumps({"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": metadata, "spec": spec})


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(arguments.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def write_policy(folder: Path, layers: int) -> int:
    """Write a random Llama, and a tokenizer without an end-of-sequence token; return the bytes of its weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=HIDDEN // 64,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    words = {"<pad>": 0} | {f" w{number}": number for number in range(1, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def batch_of(workload: str, number: int, arguments: argparse.Namespace) -> Batch:
    """Return requests with new random prompts."""
    random = np.random.default_rng((WORKLOADS.index(workload), number))
    count, longest = arguments.samples, arguments.response
    if workload == "shared-prefix":
        prompts = [_tokens(random, arguments.prefix) for _ in range(-(-count // arguments.group))]
        prompts = [prompts[sample // arguments.group] for sample in range(count)]
    else:
        prompts = [_tokens(random, int(random.integers(8, 17))) for _ in range(count)]
    if workload == "long-tailed":
        lengths = np.minimum(random.lognormal(np.log(longest / 4), 0.8, count).astype(int) + 1, longest)
    else:
        lengths = random.integers(longest // 8, longest // 4 + 1, count)
    return [(prompt, int(length)) for prompt, length in zip(prompts, lengths, strict=True)]


def _tokens(random: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in random.integers(1, VOCABULARY, count)]


async def start_all(stack: AsyncExitStack, folder: Path, arguments: argparse.Namespace) -> dict[str, DecodingWay]:
    """Start all ways, one after the other, so that each start has the machine for itself."""
    longest = -(-(arguments.prefix + arguments.response) // 32) * 32
    cache = longest * (arguments.slots + 4) * 2 * HIDDEN * 4 * arguments.layers
    common = {
        "model": str(folder / f"policy-{arguments.layers}"),
        "prompt": arguments.prefix,
        "response": arguments.response,
        "slots": arguments.slots,
        "threads": arguments.threads,
        "cache_bytes": cache,
    }
    bare = {
        "vLLM": {"way": "vllm"},
        "torch engine": {"way": "torch", "fused": "Disabled"},
        "torch engine, fusedKernels: Enabled": {"way": "torch", "fused": "Enabled"},
        "transformers.generate": {"way": "transformers"},
    }
    ways: dict[str, DecodingWay] = {}
    for name, more in bare.items():
        if name in arguments.ways:
            process = ProcessWay()
            await process.start(stack, common | more, arguments)
            ways[name] = process
    for name, engine in (("vLLM worker", "vllm"), ("torch worker", "torch")):
        if name in arguments.ways:
            ways[name] = await start_worker(stack, folder, engine, arguments.layers, arguments)
    return ways


async def measure(
    folder: Path, workload: str, ways: dict[str, DecodingWay], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Run all ways in turn on batches of one kind; the first batch is a warm-up."""
    rounds: list[dict[str, Taken]] = []
    tokens: list[int] = []
    for number in range(arguments.rounds + 1):
        batch = batch_of(workload, number, arguments)
        taken = {name: await way.decode(batch) for name, way in ways.items()}
        if number:
            rounds.append(taken)
            tokens.append(sum(length for _, length in batch))
    base = next(iter(ways))
    figures = {
        name: {
            "tokens_per_second": _median(n / taken[name].seconds for n, taken in zip(tokens, rounds, strict=True)),
            "tokens_per_cpu_second": _median(
                n / taken[name].cpu_seconds for n, taken in zip(tokens, rounds, strict=True)
            ),
            "of_base": _median(taken[base].seconds / taken[name].seconds for taken in rounds),
            "of_base_by_cpu": _median(taken[base].cpu_seconds / taken[name].cpu_seconds for taken in rounds),
        }
        for name in ways
    }
    for name, figure in figures.items():
        print(f"{workload:14} {name:38}", *(f"{key} {value:g}" for key, value in figure.items()), flush=True)
    return {"workload": workload, "tokens": tokens, "base": base, "ways": figures}


async def updates(folder: Path, sizes: dict[int, int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the seconds of a weight update by size and engine, each in a separate worker."""
    results = []
    for layers, size in sizes.items():
        for engine in [name.removesuffix(" worker").lower() for name in arguments.ways if name.endswith(" worker")]:
            async with AsyncExitStack() as stack:
                worker = await start_worker(stack, folder, engine, layers, arguments)
                times = [await worker.load(folder / f"policy-{layers}", 1 + update) for update in range(4)]
            results.append({"engine": engine, "bytes": size, "seconds": _median(times[1:])})
            print(results[-1], flush=True)
    return results


async def run(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements."""
    new_authority("engines", now := datetime.now(UTC)).issue([], now).write(folder / "certificates")
    sizes = {
        layers: write_policy(folder / f"policy-{layers}", layers)
        for layers in sorted({arguments.layers, *arguments.update_layers})
    }
    async with AsyncExitStack() as stack:
        ways = await start_all(stack, folder, arguments)
        starts = {name: round(way.start_seconds, 2) for name, way in ways.items()}
        print("seconds to start", starts, flush=True)
        workloads = [await measure(folder, workload, ways, arguments) for workload in arguments.workloads]
    wanted = {layers: size for layers, size in sizes.items() if layers in arguments.update_layers}
    return {
        "start_seconds": starts,
        "workloads": workloads,
        "weight_updates": await updates(folder, wanted, arguments),
    }


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


WAYS: Final = (
    "vLLM",
    "vLLM worker",
    "torch engine",
    "torch engine, fusedKernels: Enabled",
    "torch worker",
    "transformers.generate",
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64, help="decoded at once")
    parser.add_argument("--response", type=int, default=256, help="tokens of the longest; short: a quarter")
    parser.add_argument("--prefix", type=int, default=128, help="tokens of a shared prompt")
    parser.add_argument("--group", type=int, default=8, help="samples of a shared prompt")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--update-layers", type=int, nargs="*", default=[6, 24], help="sizes of weight updates")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--verbose", action="store_true", help="show what engines say")
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as name:
        result = asyncio.run(run(Path(name), arguments))
    if arguments.json:
        names = ("threads", "samples", "slots", "response", "prefix", "group", "layers", "rounds")
        machine = {"device": device_name(torch.device("cpu")), "machine": platform.machine()}
        print(json.dumps(machine | {name: getattr(arguments, name) for name in names} | result))


if __name__ == "__main__":
    main()
