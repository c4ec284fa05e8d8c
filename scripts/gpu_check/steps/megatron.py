"""An optimizer step of Megatron-core's layers beside one of the backend `torch`: the same gradients, and how long each.

Megatron's layers are those that need no Transformer Engine, as the backend `megatron` takes them.
"""

import importlib.util
import logging
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from gpu_check.random_models import HALF_BILLION, TINY, LlamaShape, write_model
from gpu_check.step import CheckedMachine, CheckStep, NotHereError, Report
from gpu_check.timing import best_seconds
from gpu_check.training_jobs import BatchShape, metrics_of, trainer_alone, training_job
from rlhf_workers.devices.device import open_device
from rlhf_workers.training.backends import megatron_backend, torch_backend
from rlhf_workers.training.schedule.step_timing import made_up_batch

LOADS: Final = {"torch": torch_backend.load_stage, "megatron": megatron_backend.load_stage}
COMPARED: Final = ("loss/actor", "loss/critic", "gradient_norm/actor", "gradient_norm/critic")
TOLERANCES: Final = {"Float32": 1e-5, "BFloat16": 3e-2}
"""By which losses and norms of gradients may differ, relative: other kernels, which sum in another order."""


@dataclass(frozen=True)
class BackendSizes:
    """Of the model and of what it trains on."""

    model: LlamaShape
    batch: BatchShape
    repeats: int


def run(machine: CheckedMachine, sizes: BackendSizes, report: Report) -> None:
    """Trains actor and critic by each backend in each precision."""
    if importlib.util.find_spec("megatron") is None:
        raise NotHereError("Megatron-core is not installed")
    logging.disable(logging.WARNING)  # made-up log-probabilities never match
    write_model(machine.scratch / "model", sizes.model, torch.bfloat16, device=machine.device, fast=machine.cuda)
    for precision in ("BFloat16", "Float32") if machine.bfloat16 or not machine.cuda else ("Float32",):
        for model in ("actor", "critic"):
            found = {backend: one_way(machine, sizes, precision, model, backend, report) for backend in LOADS}
            for name in (name for name in COMPARED if name in found["torch"]):
                ours, theirs = found["torch"][name], found["megatron"][name]
                apart = abs(theirs - ours) / max(abs(ours), 1e-12)
                report.check(
                    f"{precision}: {name} is that of the backend torch",
                    apart <= TOLERANCES[precision],
                    f"{theirs:.7g} and {ours:.7g} differ by {apart:.3g}",
                )


def one_way(
    machine: CheckedMachine, sizes: BackendSizes, precision: str, model: str, backend: str, report: Report
) -> dict[str, float]:
    """Return what the first step says of itself; reports a row."""
    device = open_device(machine.device)
    job = training_job(machine.scratch / "model", sizes.batch, precision=precision, backend=backend)
    trainer = trainer_alone(job, sizes.batch, device, model, LOADS[backend])
    first = metrics_of(trainer, made_up_batch(trainer))
    if machine.cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = best_seconds(partial(metrics_of, trainer, made_up_batch(trainer)), sizes.repeats, device)
    report.row(
        "steps",
        model=model,
        precision=precision,
        backend=backend,
        seconds=seconds,
        tokens_per_second=sizes.batch.tokens / seconds,
        peak_gb=torch.cuda.max_memory_allocated(device) / 1e9 if machine.cuda else 0.0,
    )
    del trainer
    if machine.cuda:
        torch.cuda.empty_cache()
    return first


STEP = CheckStep(
    "megatron",
    "Megatron-core's layers train the losses and gradients of the backend torch; seconds and memory of each",
    run,
    small=BackendSizes(TINY, BatchShape(samples=2, microbatches=2, prompt=8, response=8), repeats=1),
    gpu=BackendSizes(HALF_BILLION, BatchShape(samples=4, microbatches=2, prompt=256, response=768), repeats=2),
    limit_seconds=90,
    gpu_gigabytes=60,
)
