"""Samples that move between two engines on one device while both decode: the cache's bits, the tokens, and the speed.

Everything of a migration is the product's: the source's side, the service that takes the call, gRPC between them, host
memory on both ends. One thread computes for both engines, so what a move costs it is seen in its steps.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from gpu_check.random_models import ONE_BILLION, TINY, LlamaShape, write_model
from gpu_check.step import CheckedMachine, CheckStep, NotHereError, Report
from rlhf_api import control_pb2 as pb
from rlhf_api.samples import SampleKey, SampleRequest
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.migration.incoming import IncomingMigrations
from rlhf_workers.generation.migration.kv_sink import KvSinkService, most_arriving_bytes
from rlhf_workers.generation.migration.outgoing import OutgoingMigrations
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.models.loading import load_causal_lm, load_tokenizer
from rlhf_workers.outbox import SessionOutbox
from rlhf_workers.peer_server import start_server
from rlhf_workers.weights.source import WeightSourceService

FIELD: Final = "models.actor.path"
WAIT_SECONDS: Final = 60.0
"""For one migration; a healthy one takes a second at most."""


@dataclass(frozen=True)
class MigratedSizes:
    """Of the model and of what moves."""

    shape: LlamaShape
    samples: int
    prompt: int
    response: int
    moves_at: int
    """Response tokens when the sample leaves."""


class MoveOutbox(SessionOutbox):
    """Keeps what the source says of its migrations."""

    def __init__(self) -> None:
        super().__init__("gpu-check", lambda: None)
        self.answers: list[pb.CommandDone] = []
        self.attributes: list[dict[str, str]] = []

    def done(self, message: pb.CommandDone) -> None:
        """Keeps an answer."""
        self.answers.append(message)

    def span(self, name: str, start_ns: int, end_ns: int, iteration: int, **attributes: str) -> None:
        """Keeps what a span says."""
        self.attributes.append({"name": name, **attributes})


Work = tuple[Callable[..., Any], "Future[Any]"]


@contextmanager
def sink(engine: TorchEngine, outbox: MoveOutbox, cuda: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """The destination's address, and what its computing thread does between steps."""
    waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
    receiver = IncomingMigrations(engine)

    def receive(work: Callable[..., Any]) -> "Future[Any]":
        answer: Future[Any] = Future()
        waiting.put((work, answer))
        return answer

    def between_steps() -> None:
        while not waiting.empty():
            work, answer = waiting.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(work(receiver, outbox))
                except Exception as error:
                    answer.set_exception(error)

    loop, address, stop = asyncio.new_event_loop(), Future[str](), asyncio.Event()

    async def serve() -> None:
        service = KvSinkService(receive, most_arriving_bytes(), pinned=cuda)
        service.open()
        server = await start_server("127.0.0.1:0", None, WeightSourceService(lambda: None), service)
        address.set_result(f"127.0.0.1:{server.port}")
        await stop.wait()
        await server.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield address.result(WAIT_SECONDS), between_steps
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_SECONDS)


def samples_of(sizes: MigratedSizes) -> list[SampleRequest]:
    """Return samples that run to their last token."""
    random = np.random.Generator(np.random.Philox(key=1))
    prompts = random.integers(0, min(sizes.shape.vocabulary, 12), (sizes.samples, sizes.prompt), dtype=np.int32)
    return [
        SampleRequest(
            key=SampleKey(0, number, 0), prompt=prompt, max_response_tokens=sizes.response, random_key=number + 1
        )
        for number, prompt in enumerate(prompts)
    ]


def step_both(source: TorchEngine, destination: TorchEngine, done: dict[int, list[int]]) -> float:
    """One step of each; the seconds of the source's."""
    started = time.perf_counter()
    for engine in (source, destination):
        if engine.held:
            done |= {response.key.sample: response.tokens.tolist() for response in engine.step().finished}
        if engine is source:
            seconds = time.perf_counter() - started
    return seconds


def run(machine: CheckedMachine, sizes: MigratedSizes, report: Report) -> None:
    """Decodes undisturbed, then with half of the samples moving, and compares."""
    device = torch.device(machine.device)
    if machine.cuda and not torch.cuda.is_available():
        raise NotHereError("torch sees no GPU")
    folder = machine.scratch / "policy"
    write_model(folder, sizes.shape, torch.float32, device=machine.device, fast=machine.cuda)
    model = load_causal_lm(str(folder), field=FIELD, dtype=torch.float32, device=device, attention="sdpa")
    tokenizer = load_tokenizer(str(folder), FIELD)
    limits = EngineLimits(2 * sizes.samples, sizes.prompt, sizes.response)
    greedy = SamplingParameters(temperature=0.0)

    def engine() -> TorchEngine:
        return TorchEngine(model, tokenizer, greedy, limits, deterministic=False)

    report.say("decoding undisturbed")
    alone = engine()
    undisturbed: dict[int, list[int]] = {}
    alone.submit(samples_of(sizes))
    while alone.held:
        undisturbed |= {response.key.sample: response.tokens.tolist() for response in alone.step().finished}
    alone.sleep()
    alone.wake()
    report.say("decoding while samples move")
    done = moved(machine, sizes, engine(), engine(), report)
    same = sum(done[number] == tokens for number, tokens in undisturbed.items())
    report.check("same tokens as undisturbed", same == len(undisturbed), f"{same} of {len(undisturbed)} samples")


def moved(
    machine: CheckedMachine, sizes: MigratedSizes, source: TorchEngine, destination: TorchEngine, report: Report
) -> dict[int, list[int]]:
    """Finished tokens of all samples, half of which moved on their way."""
    outbox, done = MoveOutbox(), dict[int, list[int]]()
    source.submit(samples_of(sizes))
    leaving = list(range(0, sizes.samples, 2))
    quiet: list[float] = []
    with sink(destination, outbox, machine.cuda) as (address, between_steps):
        migrations = OutgoingMigrations(source, None)
        while len(source.moves.carried(SampleKey(0, 0, 0)).tokens) < sizes.moves_at:
            quiet.append(step_both(source, destination, done))
        command = pb.Migrate(destination=address, timeout_seconds=WAIT_SECONDS)
        for number in leaving:
            command.samples.add(key=pb.SampleKey(iteration=0, sample=number, attempt=0), new_attempt=1)
        migrations.begin(1, command, outbox)
        busy: list[float] = []
        end = time.monotonic() + WAIT_SECONDS
        while not outbox.answers and time.monotonic() < end:
            migrations.step()
            between_steps()
            busy.append(step_both(source, destination, done))
        judge(outbox, leaving, quiet, busy, report)
        while source.held or destination.held:
            step_both(source, destination, done)
    return done


def judge(outbox: MoveOutbox, leaving: list[int], quiet: list[float], busy: list[float], report: Report) -> None:
    """Says what the migrations came to."""
    results = [sample for answer in outbox.answers for sample in answer.migrate.samples]
    whys = ", ".join(sorted({sample.why for sample in results if not sample.moved}))
    count = sum(sample.moved for sample in results)
    report.check("every sample moved with its cache", count == len(leaving), f"{count} of {len(leaving)} {whys}")
    for sample in results:
        rate = sample.bytes / max(sample.seconds, 1e-9) / 1e9
        cells = {"seconds": sample.seconds, "paused_seconds": sample.paused_seconds, "gb_per_second": rate}
        report.row("moves", sample=sample.key.sample, moved=sample.moved, megabytes=sample.bytes / 1e6, **cells)
    if results:
        report.figure("cache_mb", max(sample.bytes for sample in results) / 1e6, "MB")
        report.figure("gb_per_second", sum(s.bytes for s in results) / max(s.seconds for s in results) / 1e9, "GB/s")
        report.figure("paused_ms", 1e3 * max(sample.paused_seconds for sample in results), "ms, of the sample")
    stopped = [float(said["stopped_seconds"]) for said in outbox.attributes if "stopped_seconds" in said]
    report.figure("source_stopped_ms", 1e3 * max(stopped, default=0.0), "ms of the computing thread, a sample")
    if quiet[1:] and busy:
        report.figure("step_ms_before", 1e3 * float(np.median(quiet[1:])), "ms")
        report.figure("step_ms_while_moving", 1e3 * float(np.median(busy)), "ms")


STEP = CheckStep(
    "kv_migration",
    "samples move with their KV caches between two engines on one device while both decode, and keep their tokens",
    run,
    small=MigratedSizes(TINY, samples=4, prompt=24, response=200, moves_at=40),
    gpu=MigratedSizes(ONE_BILLION, samples=8, prompt=1024, response=512, moves_at=64),
    limit_seconds=90,
    small_limit_seconds=120,
    gpu_gigabytes=30,
)
