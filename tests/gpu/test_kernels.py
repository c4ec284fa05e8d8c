"""The time of a decode step and a training step: seconds of the host, seconds of the device, and the largest kernels.

The host's share is the time of a step beyond its kernels, in which the device waits. A profile slows the step, so
seconds are measured without it, and kernels are counted in a few more steps.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Final

import pytest
from tests.gpu.decoding import WAYS, engine_of, load, requests
from tests.gpu.models import ONE_BILLION, TINY
from tests.gpu.timing import best_seconds, free_cache, wait_for
from tests.gpu.training_jobs import (
    PRECISIONS,
    SMALL_BATCH,
    BatchShape,
    begin,
    take_step,
    trainer_alone,
    training_job,
)
from torch.profiler import ProfilerActivity, profile

from gpu_check.plugin import CheckedMachine, Figures
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.training.schedule.step_timing import made_up_batch

SHOWN: Final = 12
"""Number of kernels shown for each kind of step."""
NAME_CHARACTERS: Final = 60
NAMED_OVER: Final = "Optimizer.step#"
PROFILED: Final = 5
"""Number of decode steps."""


@pytest.mark.gpu(seconds=60, gigabytes=60)
def test_kernels(machine: CheckedMachine, figures: Figures) -> None:
    """Where a decode step and a training step go, by kernels and by the host."""
    config, prompt, steps = machine.sized(TINY, ONE_BILLION), machine.sized(8, 256), machine.sized(4, 30)
    ways = machine.sized((("fused", 2),), (("fused", 1), ("fused", 16), ("captured", 16), ("fused", 64)))
    dtype, tokens = machine.dtypes[0], 2 * steps + PROFILED + 4
    model = load(machine, config, dtype)
    for way, rows in ways:
        engine = engine_of(model, rows, prompt, tokens + 8, **WAYS[way])
        engine.submit(requests(rows, prompt, tokens, config.vocab_size))
        take(engine, steps)
        wait_for(machine.device)
        started = time.perf_counter()
        take(engine, steps)
        wait_for(machine.device)
        seconds = (time.perf_counter() - started) / steps
        show(machine, f"decode step, {way}, batch {rows}", seconds, PROFILED, partial(take, engine, PROFILED), figures)
        del engine
    del model
    free_cache()
    batch = machine.sized(SMALL_BATCH, BatchShape(samples=8, microbatches=2, prompt=256, response=768))
    device = begin(machine, config)
    job = training_job(machine.scratch, batch, precision=PRECISIONS[dtype])
    trainer = trainer_alone(job, batch, device, "actor")
    step = partial(take_step, trainer, made_up_batch(trainer))
    show(machine, f"training step, {PRECISIONS[dtype]}", best_seconds(step, 2, device), 1, step, figures)


def take(engine: TorchEngine, steps: int) -> None:
    """Take this number of decode steps."""
    for _ in range(steps):
        engine.step()


def show(
    machine: CheckedMachine, name: str, seconds: float, steps: int, work: Callable[[], object], figures: Figures
) -> None:
    """Record the time of a step, and its kernels: on a CPU its operations."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if machine.cuda else [])]
    with profile(activities=activities) as watched:
        work()
        wait_for(machine.device)
    events = watched.key_averages()
    taken = {event.key: event.self_device_time_total if machine.cuda else event.self_cpu_time_total for event in events}
    calls = {event.key: event.count for event in events}
    # Operations include the time of their kernels; kernels, and annotations over them, have no host time.
    alone = [event.key for event in events if not machine.cuda or not event.self_cpu_time_total]
    kernels = [key for key in alone if not key.startswith(NAMED_OVER)]
    total, milliseconds = sum(taken[key] for key in kernels) / steps, 1e3 * seconds
    cells = {"milliseconds": milliseconds, "kernels_ms": total / 1e3, "beyond_ms": milliseconds - total / 1e3}
    figures.row("steps", what=name, **cells)
    figures.add(f"{name}: kernels", total / 1e3 / milliseconds, "share of its time that kernels take")
    for key in sorted(kernels, key=lambda key: -taken[key])[:SHOWN]:
        share = taken[key] / steps / max(total, 1e-9)
        cells = {"share": share, "microseconds": taken[key] / steps, "calls": calls[key] / steps}
        figures.row(name, kernel=key[:NAME_CHARACTERS], **cells)
