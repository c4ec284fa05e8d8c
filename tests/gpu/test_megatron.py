"""An optimizer step of Megatron-core's layers and one of the backend `torch`: equal gradients, and the time of each.

Megatron's layers are those without Transformer Engine, as in the backend `megatron`.
"""

from itertools import product
from typing import Final

import pytest
import torch
from tests.gpu.models import HALF_BILLION, TINY
from tests.gpu.timing import free_cache
from tests.gpu.training_jobs import (
    PRECISIONS,
    SMALL_BATCH,
    BatchShape,
    begin,
    take_step,
    timed_steps,
    trainer_alone,
    training_job,
)

from gpu_check.plugin import CheckedMachine, Figures
from rlhf_workers.training.schedule.step_timing import made_up_batch

COMPARED: Final = ("loss/actor", "loss/critic", "gradient_norm/actor", "gradient_norm/critic")
TOLERANCES: Final = {"Float32": 1e-5, "BFloat16": 3e-2}
"""Relative tolerances of losses and gradient norms: other kernels sum in another order."""


@pytest.mark.gpu(seconds=90, gigabytes=60)
def test_megatron(machine: CheckedMachine, figures: Figures) -> None:
    """Megatron-core's layers train the losses and gradients of the backend torch; seconds and memory of each."""
    pytest.importorskip("megatron", reason="Megatron-core is not installed")
    batch = machine.sized(SMALL_BATCH, BatchShape(samples=4, microbatches=2, prompt=256, response=768))
    device = begin(machine, machine.sized(TINY, HALF_BILLION))
    for dtype, model in product(machine.dtypes, ("actor", "critic")):
        precision = PRECISIONS[dtype]
        ours, theirs = (
            one_way(machine, batch, precision, model, backend, device, figures) for backend in ("torch", "megatron")
        )
        for name in (name for name in COMPARED if name in ours):
            apart = abs(theirs[name] - ours[name]) / max(abs(ours[name]), 1e-12)
            figures.check(
                f"{precision}: {name} is that of the backend torch",
                apart <= TOLERANCES[precision],
                f"{theirs[name]:.7g} and {ours[name]:.7g} differ by {apart:.3g}",
            )


def one_way(
    machine: CheckedMachine,
    batch: BatchShape,
    precision: str,
    model: str,
    backend: str,
    device: torch.device,
    figures: Figures,
) -> dict[str, float]:
    """Record a row; return the reported metrics of the first step."""
    free_cache()
    job = training_job(machine.scratch, batch, precision=precision, backend=backend)
    trainer = trainer_alone(job, batch, device, model)
    first = take_step(trainer)
    measured = timed_steps(trainer, made_up_batch(trainer), machine.sized(1, 2), device)
    figures.row("steps", model=model, precision=precision, backend=backend, **measured)
    return first
