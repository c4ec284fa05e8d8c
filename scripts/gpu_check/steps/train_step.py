"""One optimizer step of an actor and of a critic: how long, how much of the device's arithmetic, how much memory.

Memory is compared with the planner's estimate, with and without activation checkpointing, in each precision. On a GPU
attention's backward adds in any order: checkpointing is held to what two runs without it differ by (a CPU: nothing).
"""

import gc
import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gpu_check.random_models import ONE_BILLION, TINY, LlamaShape, write_model
from gpu_check.step import CheckedMachine, CheckStep, Figure, Report
from gpu_check.timing import best_seconds
from gpu_check.training_jobs import BatchShape, step_flops, trainer_alone, training_job
from rlhf_planner.training_memory import StageTraining, training_memory
from rlhf_planner.transformer_shape import shape_of
from rlhf_workers.devices.device import open_device
from rlhf_workers.models.precision import compute_dtype
from rlhf_workers.training.batches.token_budget import split_minibatch
from rlhf_workers.training.batches.training_batch import TrainingBatch
from rlhf_workers.training.schedule.step_timing import made_up_batch
from rlhf_workers.training.trainer import Trainer

TOLERANCE = 0.05
"""Of the estimate of memory."""
NOISE = 4.0
"""Times what two runs without checkpointing differ by that a run with it may: each is the largest of a billion."""


@dataclass(frozen=True)
class TrainStepSizes:
    """Of the model and of what it trains on."""

    model: LlamaShape
    batch: BatchShape
    repeats: int


@dataclass(frozen=True)
class Way:
    """How a model is trained."""

    model: str
    precision: str
    recompute: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.precision}, checkpointing {'on' if self.recompute else 'off'}"


def run(machine: CheckedMachine, sizes: TrainStepSizes, report: Report) -> None:
    """Trains each model each way, one after the other."""
    logging.disable(logging.WARNING)  # made-up log-probabilities never match
    device = open_device(machine.device)
    folder = machine.scratch / "model"
    report.say("making the model")
    write_model(folder, sizes.model, torch.bfloat16, device=machine.device, fast=machine.cuda)
    gradients: dict[tuple[str, str], tuple[torch.Tensor, float]] = {}
    for precision in ("BFloat16", "Float32") if machine.bfloat16 or not machine.cuda else ("Float32",):
        for model in ("actor", "critic"):
            for recompute in (False, True):
                way = Way(model, precision, recompute)
                report.say(str(way))
                first, noise = one_way(machine, sizes, report, folder, way, device)
                if not recompute:
                    gradients[model, precision] = first, noise
                    continue
                other, noise = gradients.pop((model, precision))
                apart = largest_difference(first, other)
                report.check(
                    f"checkpointing keeps the gradient: {model}, {precision}",
                    apart <= NOISE * noise,
                    f"differs by {apart:.3g} at most, two runs without it by {noise:.3g}",
                )


def one_way(
    machine: CheckedMachine, sizes: TrainStepSizes, report: Report, folder: Path, way: Way, device: torch.device
) -> tuple[torch.Tensor, float]:
    """Reports one way of training; the gradients of its first step, on the host, and what a second run differs by."""
    gc.collect()  # a trainer refers to itself, so the one before is still there
    if machine.cuda:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device) if machine.cuda else 0
    job = training_job(folder, sizes.batch, precision=way.precision, activationCheckpointing=way.recompute)
    trainer = trainer_alone(job, sizes.batch, device, way.model)
    batch = made_up_batch(trainer)
    gradients = first_gradients(trainer, batch, sizes, way)
    noise = 0.0 if way.recompute else largest_difference(gradients, first_gradients(trainer, batch, sizes, way))
    train(trainer)  # makes the moments
    if machine.cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = best_seconds(partial(train, trainer), sizes.repeats, device)
    flops = step_flops(sizes.model, sizes.batch, logits=way.model == "actor")
    cells: dict[str, Figure] = {
        "model": way.model,
        "precision": way.precision,
        "checkpointing": way.recompute,
        "seconds": seconds,
        "pipeline_seconds": min(trainer.step_seconds),
        "tokens_per_second": sizes.batch.tokens / seconds,
        "tflops": flops / seconds / 1e12,
    }
    limit = machine.measured("machine", f"{str(compute_dtype(job.spec)).removeprefix('torch.')}_tflops")
    if limit:
        cells["utilisation"] = flops / seconds / 1e12 / limit
    parts = training_memory(stage_of(machine, folder, sizes, way))
    cells["estimated_gb"] = sum(parts.values()) / 1e9
    if machine.cuda:
        measured = torch.cuda.max_memory_allocated(device) - before
        cells["measured_gb"] = measured / 1e9
        cells["reserved_gb"] = torch.cuda.memory_reserved(device) / 1e9
        error = sum(parts.values()) / measured - 1
        named = ", ".join(f"{name} {count / 1e9:.2f}" for name, count in parts.items())
        report.check(f"memory as estimated: {way}", abs(error) <= TOLERANCE, f"{error:+.1%} of GB: {named}")
    report.row("steps", **cells)
    return gradients, noise


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of any element."""
    return float((one - other).abs().max())


def first_gradients(trainer: Trainer, batch: TrainingBatch, sizes: TrainStepSizes, way: Way) -> torch.Tensor:
    """Return the gradients of a mini-batch, on the host."""
    rows = list(range(sizes.batch.samples * sizes.batch.microbatches))
    plan = split_minibatch(trainer.layout, rows, batch.lengths, together=1, most_tokens=None)
    (work,) = trainer.mini_batch(batch, plan, trainer.objectives()).values()
    for microbatch in range(sizes.batch.microbatches):
        work.forward(0, microbatch, work.embed(microbatch)).backward()
    gradients = trainer.optimizers[way.model, 0].gradients
    copied = gradients.to("cpu", copy=True)
    gradients.zero_()
    return copied


def train(trainer: Trainer) -> None:
    """Takes one optimizer step."""
    for _ in trainer.train(0, made_up_batch(trainer)):
        pass


def stage_of(machine: CheckedMachine, folder: Path, sizes: TrainStepSizes, way: Way) -> StageTraining:
    """What the planner is told of it."""
    return StageTraining(
        shape_of(json.loads((folder / "config.json").read_text())),
        stages=1,
        stage=0,
        head="lm" if way.model == "actor" else "value",
        samples=sizes.batch.samples,
        tokens=sizes.batch.prompt + sizes.batch.response,
        response_tokens=sizes.batch.response,
        half=way.precision == "BFloat16",
        recompute=way.recompute,
        on_gpu=machine.cuda,
    )


STEP = CheckStep(
    "train_step",
    "steps of actor and critic: time, utilisation, memory within 5% of the estimate; checkpointing keeps the gradient",
    run,
    small=TrainStepSizes(TINY, BatchShape(samples=2, microbatches=2, prompt=8, response=8), repeats=1),
    gpu=TrainStepSizes(ONE_BILLION, BatchShape(samples=8, microbatches=2, prompt=256, response=768), repeats=2),
    limit_seconds=150,
    gpu_gigabytes=60,
)
