"""Where a decode step and a training step go: seconds of the host, seconds of the device, and the kernels with most.

The host's share is what a step takes beyond its kernels: the device waits for it. A profile slows what it watches, so
seconds are measured without it, and kernels are counted in a few more steps.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_check.random_models import ONE_BILLION, TINY, LlamaShape, write_model
from gpu_check.step import CheckedMachine, CheckStep, Report
from gpu_check.steps import decode
from gpu_check.timing import best_seconds, wait_for
from gpu_check.training_jobs import BatchShape, metrics_of, trainer_alone, training_job
from rlhf_workers.devices.device import open_device
from rlhf_workers.training.schedule.step_timing import made_up_batch

SHOWN: Final = 12
"""Kernels of each kind of step."""
NAME_CHARACTERS: Final = 60
NAMED_OVER: Final = "Optimizer.step#"
PROFILED: Final = 5
"""Decode steps."""


@dataclass(frozen=True)
class ProfiledSizes:
    """Of the model and of the steps."""

    model: LlamaShape
    decoded: tuple[tuple[str, int], ...]
    """(way of decoding, samples of the batch)."""
    prompt: int
    steps: int
    """Decode steps before and while they are timed."""
    batch: BatchShape


def run(machine: CheckedMachine, sizes: ProfiledSizes, report: Report) -> None:
    """Decodes each way, then trains."""
    logging.disable(logging.WARNING)  # made-up log-probabilities never match
    dtype = torch.bfloat16 if machine.bfloat16 or not machine.cuda else torch.float32
    tokens = 2 * sizes.steps + PROFILED + 4
    model_sizes = decode.DecodedSizes(sizes.model, (1,), sizes.prompt, tokens, 1, 1)
    model = decode.load(machine, model_sizes, dtype)
    for way, rows in sizes.decoded:
        decode_steps(machine, sizes, model, model_sizes, way, rows, report)
    del model
    device = open_device(machine.device)
    write_model(machine.scratch / "model", sizes.model, torch.bfloat16, device=machine.device, fast=machine.cuda)
    precision = "BFloat16" if dtype == torch.bfloat16 else "Float32"
    job = training_job(machine.scratch / "model", sizes.batch, precision=precision)
    trainer = trainer_alone(job, sizes.batch, device, "actor")
    step = partial(metrics_of, trainer, made_up_batch(trainer))
    step()
    show(machine, f"training step, {precision}", best_seconds(step, 2, device), 1, step, report)


def decode_steps(
    machine: CheckedMachine,
    sizes: ProfiledSizes,
    model: Any,
    model_sizes: decode.DecodedSizes,
    way: str,
    rows: int,
    report: Report,
) -> None:
    """Times and profiles the steps of one batch."""
    device = torch.device(machine.device)
    engine = decode.engine_of(model, rows, model_sizes, **decode.WAYS[way])
    engine.submit(decode.requests(rows, sizes.prompt, model_sizes.tokens, sizes.model.vocabulary))
    for _ in range(sizes.steps):
        engine.step()
    wait_for(device)
    started = time.perf_counter()
    for _ in range(sizes.steps):
        engine.step()
    wait_for(device)
    seconds = (time.perf_counter() - started) / sizes.steps

    def several() -> None:
        for _ in range(PROFILED):
            engine.step()

    show(machine, f"decode step, {way}, batch {rows}", seconds, PROFILED, several, report)
    while engine.held:
        engine.step()


def show(
    machine: CheckedMachine, what: str, seconds: float, steps: int, work: Callable[[], object], report: Report
) -> None:
    """Reports what a step takes, and its kernels: on a CPU its operations."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if machine.cuda else [])]
    with profile(activities=activities) as watched:
        work()
        wait_for(torch.device(machine.device))
    events = watched.key_averages()
    taken = {event.key: event.self_device_time_total if machine.cuda else event.self_cpu_time_total for event in events}
    calls = {event.key: event.count for event in events}
    # Operations have the time of their kernels too; kernels, and what is named over them, have no time of the host.
    alone = [event.key for event in events if not machine.cuda or not event.self_cpu_time_total]
    kernels = [key for key in alone if not key.startswith(NAMED_OVER)]
    total = sum(taken[key] for key in kernels) / steps
    report.row(
        "steps", what=what, milliseconds=1e3 * seconds, kernels_ms=total / 1e3, beyond_ms=1e3 * seconds - total / 1e3
    )
    report.figure(f"{what}: kernels", total / 1e3 / (1e3 * seconds), "share of its time that kernels take")
    for key in sorted(kernels, key=lambda key: -taken[key])[:SHOWN]:
        share = taken[key] / steps / max(total, 1e-9)
        name = key[:NAME_CHARACTERS]
        report.row(what, kernel=name, share=share, microseconds=taken[key] / steps, calls=calls[key] / steps)


STEP = CheckStep(
    "kernels",
    "where a decode step and a training step go, by kernels and by the host",
    run,
    small=ProfiledSizes(TINY, (("fused", 2),), 8, 4, BatchShape(samples=2, microbatches=2, prompt=8, response=8)),
    gpu=ProfiledSizes(
        ONE_BILLION,
        (("fused", 1), ("fused", 16), ("captured", 16), ("fused", 64)),
        prompt=256,
        steps=30,
        batch=BatchShape(samples=8, microbatches=2, prompt=256, response=768),
    ),
    limit_seconds=60,
    gpu_gigabytes=60,
)
