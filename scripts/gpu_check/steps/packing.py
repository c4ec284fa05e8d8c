"""One mini-batch of long-tailed lengths: padded micro-batches, padded ones under a bound of tokens, and packed ones.

The bounds of tokens are what the largest micro-batch by samples had, so each way needs about the same memory.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from gpu_check.random_models import HALF_BILLION, TINY, LlamaShape, write_model
from gpu_check.step import CheckedMachine, CheckStep, Report
from gpu_check.timing import best_seconds
from gpu_check.training_jobs import BatchShape, metrics_of, trainer_alone, training_job
from rlhf_workers.devices.device import open_device
from rlhf_workers.training.batches.training_batch import TrainingBatch
from rlhf_workers.training.schedule.step_timing import made_up_batch
from rlhf_workers.training.trainer import Trainer

SPREAD: Final = 1.0
"""Standard deviation of the logarithm of lengths: the longest of a few dozen is about eight medians."""
TOLERANCES: Final = {"Float32": 1e-4, "BFloat16": 2e-2}
"""By which gradient norms may differ, relative: kernels of other shapes sum in another order."""


@dataclass(frozen=True)
class PackedSizes:
    """Of the model and of the mini-batch."""

    model: LlamaShape
    samples: int
    together: int
    """Samples of a padded micro-batch."""
    prompt: int
    median: int
    longest: int
    repeats: int


def run(machine: CheckedMachine, sizes: PackedSizes, report: Report) -> None:
    """Trains the same mini-batch each way in each precision."""
    logging.disable(logging.WARNING)  # made-up log-probabilities never match
    write_model(machine.scratch / "model", sizes.model, torch.bfloat16, device=machine.device, fast=machine.cuda)
    for precision in ("BFloat16", "Float32") if machine.bfloat16 or not machine.cuda else ("Float32",):
        padded = one_way(machine, sizes, precision, "padded", sizes.together, {}, report)
        bound = int(padded["largest"])
        ways: dict[str, dict[str, Any]] = {"token bound": {}, "packed": {"packing": True}}
        for way, fields in ways.items():
            fields["microBatchTokens"] = bound
            found = one_way(machine, sizes, precision, way, sizes.samples, fields, report)
            apart = abs(found["norm"] / padded["norm"] - 1)
            report.check(
                f"{precision}, {way}: the gradient's norm is that of padded micro-batches",
                apart <= TOLERANCES[precision],
                f"they differ by {apart:.3g}",
            )
            name = f"{precision}_{way.replace(' ', '_')}_times_as_fast"
            report.figure(name, padded["seconds"] / found["seconds"], "times as fast as padded micro-batches")


def one_way(
    machine: CheckedMachine,
    sizes: PackedSizes,
    precision: str,
    way: str,
    together: int,
    training: Mapping[str, Any],
    report: Report,
) -> dict[str, float]:
    """Return seconds of a step, the largest micro-batch in tokens and the gradient's norm; reports a row."""
    device = open_device(machine.device)
    shape = BatchShape(together, sizes.samples // together, sizes.prompt, sizes.longest)
    job = training_job(machine.scratch / "model", shape, precision=precision, **training)
    trainer = trainer_alone(job, shape, device, "actor")
    batch = long_tailed(trainer, sizes)
    norm = metrics_of(trainer, batch)["gradient_norm/actor"]
    if machine.cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = best_seconds(partial(metrics_of, trainer, batch), sizes.repeats, device)
    metrics = metrics_of(trainer, batch)
    found = {"seconds": seconds, "largest": metrics["train/largest_micro_batch_tokens"], "norm": norm}
    report.row(
        "steps",
        precision=precision,
        way=way,
        seconds=seconds,
        micro_batches=metrics["train/micro_batches"],
        largest_tokens=found["largest"],
        padding=metrics["train/padding"],
        tokens_per_second=sum(batch.lengths) / seconds,
        peak_gb=torch.cuda.max_memory_allocated(device) / 1e9 if machine.cuda else 0.0,
    )
    del trainer, batch
    if machine.cuda:
        torch.cuda.empty_cache()
    return found


def long_tailed(trainer: Trainer, sizes: PackedSizes) -> TrainingBatch:
    """The made-up mini-batch, its responses cut to log-normal lengths of which one is the longest."""
    whole = made_up_batch(trainer)
    drawn = torch.randn(sizes.samples, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lengths = (sizes.median * (SPREAD * drawn).exp()).round().clamp(1, sizes.longest).long()
    lengths[sizes.samples // 2] = sizes.longest
    mask = torch.arange(sizes.longest)[None, :] < lengths[:, None]
    fields = {name: values * mask for name, values in whole.fields.items()}
    return replace(whole, responses=whole.responses * mask, response_lengths=lengths, mask=mask, fields=fields)


STEP = CheckStep(
    "packing",
    "packed micro-batches of long-tailed lengths train the gradients of padded ones, and how much faster",
    run,
    small=PackedSizes(TINY, samples=8, together=2, prompt=4, median=6, longest=32, repeats=1),
    gpu=PackedSizes(HALF_BILLION, samples=64, together=8, prompt=128, median=256, longest=2048, repeats=2),
    limit_seconds=90,
    gpu_gigabytes=60,
)
