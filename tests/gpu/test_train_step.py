"""One optimizer step of an actor and of a critic: its time, the used share of the device's arithmetic, and its memory.

Memory is compared with the planner's estimate, with and without activation checkpointing, in each precision. On a GPU
attention's backward adds in any order: checkpointing may differ as much as two runs without it do (on a CPU: not at
all).
"""

import json
from dataclasses import dataclass
from itertools import product
from typing import Final

import pytest
import torch
from tests.gpu.models import ONE_BILLION, TINY
from tests.gpu.timing import begin_peak, best_seconds, free_cache, peak_bytes
from tests.gpu.training_jobs import (
    PRECISIONS,
    SMALL_BATCH,
    BatchShape,
    begin,
    step_flops,
    take_step,
    trainer_alone,
    training_job,
)
from transformers import LlamaConfig

from gpu_check.plugin import CheckedMachine, Figure, Figures
from rlhf_planner.training_memory import StageTraining, training_memory
from rlhf_planner.transformer_shape import shape_of
from rlhf_workers.models.precision import compute_dtype
from rlhf_workers.training.batches.token_budget import split_minibatch
from rlhf_workers.training.schedule.step_timing import made_up_batch
from rlhf_workers.training.trainer import Trainer

TOLERANCE: Final = 0.05
"""Tolerance relative to the estimate of memory."""
NOISE: Final = 4.0
"""Factor by which a run with checkpointing may differ more than two runs without it: each is the largest of a billion.
"""


@dataclass(frozen=True)
class Way:
    """How a model is trained."""

    model: str
    precision: str
    recompute: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.precision}, checkpointing {'on' if self.recompute else 'off'}"


@pytest.mark.gpu(seconds=150, gigabytes=60)
def test_train_step(machine: CheckedMachine, figures: Figures) -> None:
    """Steps of actor and critic: time, utilisation, memory within 5% of the estimate; checkpointing keeps gradients."""
    config = machine.sized(TINY, ONE_BILLION)
    batch = machine.sized(SMALL_BATCH, BatchShape(samples=8, microbatches=2, prompt=256, response=768))
    device = begin(machine, config)
    for dtype, model in product(machine.dtypes, ("actor", "critic")):
        precision = PRECISIONS[dtype]
        first, noise = one_way(machine, figures, config, batch, Way(model, precision, recompute=False), device)
        other, _ = one_way(machine, figures, config, batch, Way(model, precision, recompute=True), device)
        apart = float((first - other).abs().max())
        figures.check(
            f"checkpointing keeps the gradient: {model}, {precision}",
            apart <= NOISE * noise,
            f"differs by {apart:.3g} at most, two runs without it by {noise:.3g}",
        )


def one_way(
    machine: CheckedMachine, figures: Figures, config: LlamaConfig, batch: BatchShape, way: Way, device: torch.device
) -> tuple[torch.Tensor, float]:
    """Record one way of training; return the gradients of its first step, and the difference of a second run."""
    free_cache()
    before = begin_peak(device)
    job = training_job(machine.scratch, batch, precision=way.precision, activationCheckpointing=way.recompute)
    trainer = trainer_alone(job, batch, device, way.model)
    gradients = first_gradients(trainer, batch, way)
    noise = 0.0 if way.recompute else float((gradients - first_gradients(trainer, batch, way)).abs().max())
    take_step(trainer)  # allocates the moments
    begin_peak(device)
    seconds = best_seconds(lambda: take_step(trainer), machine.sized(1, 2), device)
    rate = step_flops(config, batch, logits=way.model == "actor") / seconds / 1e12
    parts = training_memory(stage_of(machine, batch, way))
    estimated = sum(parts.values())
    cells: dict[str, Figure] = {"model": way.model, "precision": way.precision, "checkpointing": way.recompute}
    cells |= {"seconds": seconds, "pipeline_seconds": min(trainer.step_seconds)}
    cells |= {"tokens_per_second": batch.tokens / seconds, "tflops": rate}
    limit = machine.measured("machine", f"{str(compute_dtype(job.spec)).removeprefix('torch.')}_tflops")
    cells |= {"utilisation": rate / limit} if limit else {}
    cells["estimated_gb"] = estimated / 1e9
    if machine.cuda:
        measured = peak_bytes(device) - before
        cells |= {"measured_gb": measured / 1e9, "reserved_gb": torch.cuda.memory_reserved(device) / 1e9}
        error = estimated / measured - 1
        named = ", ".join(f"{name} {count / 1e9:.2f}" for name, count in parts.items())
        figures.check(f"memory as estimated: {way}", abs(error) <= TOLERANCE, f"{error:+.1%} of GB: {named}")
    figures.row("steps", **cells)
    return gradients, noise


def first_gradients(trainer: Trainer, shape: BatchShape, way: Way) -> torch.Tensor:
    """Return the gradients of a mini-batch, on the host."""
    batch, rows = made_up_batch(trainer), list(range(shape.samples * shape.microbatches))
    plan = split_minibatch(trainer.layout, rows, batch.lengths, together=1, most_tokens=None)
    (work,) = trainer.mini_batch(batch, plan, trainer.objectives()).values()
    for microbatch in range(shape.microbatches):
        work.forward(0, microbatch, work.embed(microbatch)).backward()
    gradients = trainer.optimizers[way.model, 0].gradients
    copied = gradients.to("cpu", copy=True)
    gradients.zero_()
    return copied


def stage_of(machine: CheckedMachine, batch: BatchShape, way: Way) -> StageTraining:
    """Return the planner's description of it."""
    return StageTraining(
        shape_of(json.loads((machine.scratch / "model" / "config.json").read_text())),
        stages=1,
        stage=0,
        head="lm" if way.model == "actor" else "value",
        samples=batch.samples,
        tokens=batch.prompt + batch.response,
        response_tokens=batch.response,
        half=way.precision == "BFloat16",
        recompute=way.recompute,
        on_gpu=machine.cuda,
    )
