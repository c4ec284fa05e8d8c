"""Samples that move between two engines on one device while both decode: the cache's bits, the tokens, and the speed.

The migration uses the product's code: the source, the service that takes the call, gRPC between them, host memory on
both ends. One thread computes for both engines, so the cost of a move shows in its steps.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest
import torch
from tests.gpu.decoding import decoded, engine_of, load, requests
from tests.gpu.models import ONE_BILLION, TINY
from tests.support.workers.outbox import RecordedOutbox

from gpu_check.plugin import CheckedMachine, Figures
from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey
from rlhf_workers.generation.migration.incoming import IncomingMigrations
from rlhf_workers.generation.migration.kv_sink import KvSinkService, most_arriving_bytes
from rlhf_workers.generation.migration.outgoing import OutgoingMigrations
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.peer_server import start_server
from rlhf_workers.weights.source import WeightSourceService

WAIT_SECONDS: Final = 60.0
"""Seconds for one migration."""
Work = tuple[Callable[..., Any], "Future[Any]"]


@pytest.mark.gpu(seconds=90, gigabytes=30)
def test_kv_migration(machine: CheckedMachine, figures: Figures) -> None:
    """Samples move with their KV caches between two engines on one device while both decode, and keep their tokens."""
    config = machine.sized(TINY, ONE_BILLION)
    count, prompt, response, moves_at = machine.sized((4, 24, 200, 40), (8, 1024, 512, 64))
    model = load(machine, config, torch.float32)
    samples = requests(count, prompt, response, config.vocab_size)

    def engine() -> TorchEngine:
        return engine_of(model, 2 * count, prompt, response, greedy=True)

    figures.say("decoding undisturbed")
    alone = engine()
    undisturbed = decoded(alone, samples)
    alone.sleep()
    alone.wake()
    figures.say("decoding while samples move")
    source, destination, outbox = engine(), engine(), RecordedOutbox()
    source.submit(samples)
    leaving, done = range(0, count, 2), dict[int, list[int]]()
    quiet, busy = list[float](), list[float]()
    with sink(destination, outbox, machine.cuda) as (address, between_steps):
        migrations = OutgoingMigrations(source, None)
        while len(source.moves.carried(SampleKey(0, 0, 0)).tokens) < moves_at:
            quiet.append(step_both(source, destination, done))
        command = pb.Migrate(destination=address, timeout_seconds=WAIT_SECONDS)
        for number in leaving:
            command.samples.add(key=pb.SampleKey(iteration=0, sample=number, attempt=0), new_attempt=1)
        migrations.begin(1, command, outbox)
        end = time.monotonic() + WAIT_SECONDS
        while not outbox.answers and time.monotonic() < end:
            migrations.step()
            between_steps()
            busy.append(step_both(source, destination, done))
        record(outbox, len(leaving), quiet, busy, figures)
        while source.in_flight or destination.in_flight:
            step_both(source, destination, done)
    same = sum(done[number] == tokens for number, tokens in undisturbed.items())
    figures.check("same tokens as undisturbed", same == len(undisturbed), f"{same} of {len(undisturbed)} samples")


@contextmanager
def sink(engine: TorchEngine, outbox: RecordedOutbox, cuda: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the destination's address, and the work of its computing thread between steps."""
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


def step_both(source: TorchEngine, destination: TorchEngine, done: dict[int, list[int]]) -> float:
    """Take one step of each engine; return the seconds of the source's."""
    started = time.perf_counter()
    for engine in (source, destination):
        if engine.in_flight:
            done |= {response.key.sample: response.tokens.tolist() for response in engine.step().finished}
        if engine is source:
            seconds = time.perf_counter() - started
    return seconds


def record(outbox: RecordedOutbox, leaving: int, quiet: list[float], busy: list[float], figures: Figures) -> None:
    """Record the results of the migrations."""
    results = [sample for answer in outbox.answers for sample in answer.migrate.samples]
    whys = ", ".join(sorted({sample.why for sample in results if not sample.moved}))
    count = sum(sample.moved for sample in results)
    figures.check("every sample moved with its cache", count == leaving, f"{count} of {leaving} {whys}")
    for sample in results:
        rate = sample.bytes / max(sample.seconds, 1e-9) / 1e9
        cells = {"seconds": sample.seconds, "paused_seconds": sample.paused_seconds, "gb_per_second": rate}
        figures.row("moves", sample=sample.key.sample, moved=sample.moved, megabytes=sample.bytes / 1e6, **cells)
    if results:
        figures.add("cache_mb", max(sample.bytes for sample in results) / 1e6, "MB")
        figures.add("gb_per_second", sum(s.bytes for s in results) / max(s.seconds for s in results) / 1e9, "GB/s")
        figures.add("paused_ms", 1e3 * max(sample.paused_seconds for sample in results), "ms, of the sample")
    stopped = [float(span[4]["stopped_seconds"]) for span in outbox.reports("span") if "stopped_seconds" in span[4]]
    figures.add("source_stopped_ms", 1e3 * max(stopped, default=0.0), "ms of the computing thread, a sample")
    if quiet[1:] and busy:
        figures.add("step_ms_before", 1e3 * float(np.median(quiet[1:])), "ms")
        figures.add("step_ms_while_moving", 1e3 * float(np.median(busy)), "ms")
