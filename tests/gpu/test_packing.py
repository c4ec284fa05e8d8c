"""One mini-batch of long-tailed lengths: padded micro-batches, padded ones with a token limit, and packed ones.

The token limits equal the largest micro-batch by samples, so each way needs about the same memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
import torch
from tests.gpu.models import HALF_BILLION, TINY
from tests.gpu.timing import free_cache
from tests.gpu.training_jobs import PRECISIONS, BatchShape, begin, take_step, timed_steps, trainer_alone, training_job

from gpu_check.plugin import CheckedMachine, Figures
from rlhf_workers.training.batches.training_batch import TrainingBatch
from rlhf_workers.training.schedule.step_timing import made_up_batch
from rlhf_workers.training.trainer import Trainer

SPREAD: Final = 1.0
"""Standard deviation of the logarithm of lengths: the longest of a few dozen is about eight medians."""
TOLERANCES: Final = {"Float32": 1e-4, "BFloat16": 2e-2}
"""Relative tolerances of gradient norms: kernels of other shapes sum in another order."""


@dataclass(frozen=True)
class PackedSizes:
    """Sizes of the mini-batch."""

    samples: int
    together: int
    """Samples of a padded micro-batch."""
    prompt: int
    median: int
    longest: int


SMALL = PackedSizes(samples=8, together=2, prompt=4, median=6, longest=32)
LARGE = PackedSizes(samples=64, together=8, prompt=128, median=256, longest=2048)


@pytest.mark.gpu(seconds=90, gigabytes=60)
def test_packing(machine: CheckedMachine, figures: Figures) -> None:
    """Packed micro-batches of long-tailed lengths train the gradients of padded ones, and how much faster."""
    sizes, device = machine.sized(SMALL, LARGE), begin(machine, machine.sized(TINY, HALF_BILLION))
    for dtype in machine.dtypes:
        precision = PRECISIONS[dtype]
        padded = one_way(machine, sizes, device, precision, "padded", sizes.together, {}, figures)
        bound = int(padded["largest_tokens"])
        for way, packing in {"token bound": {}, "packed": {"packing": True}}.items():
            fields = {"microBatchTokens": bound, **packing}
            found = one_way(machine, sizes, device, precision, way, sizes.samples, fields, figures)
            apart = abs(found["norm"] / padded["norm"] - 1)
            figures.check(
                f"{precision}, {way}: the gradient's norm is that of padded micro-batches",
                apart <= TOLERANCES[precision],
                f"they differ by {apart:.3g}",
            )
            name = f"{precision}_{way.replace(' ', '_')}_times_as_fast"
            figures.add(name, padded["seconds"] / found["seconds"], "times as fast as padded micro-batches")


def one_way(
    machine: CheckedMachine,
    sizes: PackedSizes,
    device: torch.device,
    precision: str,
    way: str,
    together: int,
    training: Mapping[str, Any],
    figures: Figures,
) -> dict[str, float]:
    """Record a row; return it with the gradient's norm."""
    free_cache()
    shape = BatchShape(together, sizes.samples // together, sizes.prompt, sizes.longest)
    trainer = trainer_alone(
        training_job(machine.scratch, shape, precision=precision, **training), shape, device, "actor"
    )
    batch = long_tailed(trainer, sizes)
    first = take_step(trainer, batch)
    row = {
        **timed_steps(trainer, batch, machine.sized(1, 2), device),
        "micro_batches": first["train/micro_batches"],
        "largest_tokens": first["train/largest_micro_batch_tokens"],
        "padding": first["train/padding"],
    }
    figures.row("steps", precision=precision, way=way, **row)
    return row | {"norm": first["gradient_norm/actor"]}


def long_tailed(trainer: Trainer, sizes: PackedSizes) -> TrainingBatch:
    """Return the generated mini-batch, with responses cut to log-normal lengths, one of them the longest."""
    whole = made_up_batch(trainer)
    drawn = torch.randn(sizes.samples, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lengths = (sizes.median * (SPREAD * drawn).exp()).round().clamp(1, sizes.longest).long()
    lengths[sizes.samples // 2] = sizes.longest
    mask = torch.arange(sizes.longest)[None, :] < lengths[:, None]
    fields = {name: values * mask for name, values in whole.fields.items()}
    return replace(whole, responses=whole.responses * mask, response_lengths=lengths, mask=mask, fields=fields)
