"""Measures the costs of training on this rank, for `rlhf plan`.

A rank times the layers, the embedding, and the head with the loss of each of its models, forward and backward, and an
optimizer step. Rule: measurements never change state that training reads: gradients are zeroed again, and the optimizer
steps copies.
"""

import logging
import statistics
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch

from rlhf_common.schedule import Action
from rlhf_planner.plan_search.cost_document import CostDocument
from rlhf_planner.plan_search.cost_figures import ModelPart
from rlhf_workers.models.precision import shared_casts
from rlhf_workers.training.batches.training_batch import TrainingBatch, micro_batch
from rlhf_workers.training.communication.communicator import PeerLostError
from rlhf_workers.training.hardware_figures import (
    COPIED_BYTES,
    LEAST_SECONDS,
    PART_SECONDS,
    REPEATS,
    Figures,
    clocked,
    copied_bytes_per_second,
    device_name,
    link_figures,
    measured_figure,
    operations_per_second,
    shortest,
)
from rlhf_workers.training.optimizers.adamw import AdamW, adamw_of
from rlhf_workers.training.optimizers.optimizer import StageOptimizer
from rlhf_workers.training.schedule.step_timing import made_up_batch, run_stage, stage_row
from rlhf_workers.training.stages.pipeline_stage import PipelineStage
from rlhf_workers.training.stages.stage_work import StageWork
from rlhf_workers.training.trainer import Trainer

log = logging.getLogger(__name__)

IN_A_ROW: Final = 3
"""Number of micro-batches in a timed run; 1 if they are slow."""
STEPPED: Final = 2**24
"""Maximum parameters of a stage that are copied and stepped."""
PAUSE_SECONDS: Final = 0.05
"""Seconds of waiting before a first micro-batch."""

Steps = Generator[None, None, CostDocument]


def profile_costs(trainer: Trainer) -> Steps:
    """Measure a bounded part per step of the iterator, and return the figures of this rank. All ranks must call it at
    the same time.
    """
    figures: Figures = {"device": device_name(trainer.device)}
    trainer.barrier()
    try:
        for name, figure in _local_figures(trainer):
            figures[name] = figure
            yield
    except PeerLostError:
        raise
    except Exception as error:
        log.warning("costs of this rank are not measured: %s: %s", type(error).__name__, error)
    finally:
        for optimizer in trainer.optimizers.values():
            optimizer.gradients.zero_()
    figures |= link_figures(trainer)
    return CostDocument.model_validate(figures)


def _local_figures(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    yield "flops", measured_figure(operations_per_second(trainer.device, trainer.compute))
    yield "memoryBandwidth", measured_figure(copied_bytes_per_second(trainer.device))
    layout, sharded = trainer.layout, trainer.spec.training.parallelism.shard > 1
    if sharded or layout.in_tensor_groups or layout.expert > 1 or layout.context > 1:
        log.info("layers and optimizer are not timed: ranks communicate within a layer")
        return
    if (step := _step_seconds(trainer)) is not None:
        yield "optimizerSeconds", measured_figure(step)
    timing = _StageTiming(trainer)
    yield "stageSeconds", measured_figure(timing.constant)
    layers: list[Figures] = []
    starts: list[float] = []
    for (model, _), stage in sorted(trainer.stages.items(), key=lambda item: item[0]):
        layers += timing.entries(model, stage)
        yield "layers", layers
        starts.append(timing.start_seconds(model, stage))
    yield "startSeconds", measured_figure(statistics.fmean(starts))


# ---------------------------------------------------------------- the optimizer


def _step_seconds(trainer: Trainer) -> float | None:
    """Return the seconds of an optimizer step per parameter: norm, scaling, AdamW and zeroing, on copies.

    None for a rank that steps no parameter.
    """
    seconds, count = 0.0, 0
    for optimizer in trainer.optimizers.values():
        copies = _copies(optimizer)
        if not copies:
            continue
        gradients = torch.full((sum(copy.numel() for copy in copies.values()),), 1e-3, device=trainer.device)
        parts = gradients.split([copy.numel() for copy in copies.values()])
        for copy, part in zip(copies.values(), parts, strict=True):
            copy.grad = part.view_as(copy)
        adamw = adamw_of(copies, trainer.spec.training.optimizer, trainer.device, offload=False)
        seconds += shortest(clocked(trainer.device, partial(_step, adamw, gradients)))
        count += gradients.numel()
    return seconds / count if count else None


def _copies(optimizer: StageOptimizer) -> dict[str, torch.Tensor]:
    """Return copies of the first STEPPED elements that an optimizer steps, as matrices."""
    copies: dict[str, torch.Tensor] = {}
    size = 0
    for name in sorted(optimizer.stepped):
        if size < STEPPED:
            value = optimizer.parameters[name].detach().flatten()[: STEPPED - size]
            copies[name] = value.clone().view(-1, 1)
            size += value.numel()
    return copies


def _step(adamw: AdamW, gradients: torch.Tensor) -> None:
    float(torch.linalg.vector_norm(gradients, dtype=torch.float64))
    gradients.mul_(1.0)
    adamw.step(1e-6)
    gradients.zero_()


# ---------------------------------------------------------------- stages


class _WithoutLayers:
    """A stage whose layers return their input: its embedding, head and parameters are the stage's own."""

    def __init__(self, stage: PipelineStage) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def __call__(self, hidden: torch.Tensor, *_: object) -> torch.Tensor:
        return hidden * 1.0


@dataclass(frozen=True)
class _Place:
    """Number of a stage, and number of stages, as the executor gets them."""

    stage: int
    stages: int


FIRST, MIDDLE, LAST = _Place(0, 2), _Place(1, 3), _Place(1, 2)


class _StageTiming:
    """Times parts of this rank's stages with micro-batches of some sizes."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._batch = trainer, made_up_batch(trainer)
        self._losses = {model: objective.loss for model, objective in trainer.objectives().items()}
        (model, _), stage = next(iter(trainer.stages.items()))
        self.constant = self._seconds(model, cast(PipelineStage, _WithoutLayers(stage)), MIDDLE, 1)
        """Seconds of a micro-batch on a stage without layers."""

    def entries(self, model: str, stage: PipelineStage) -> Iterator[Figures]:
        """Yield the times of a layer, and of the embedding and the head if the stage has them."""
        layers, ends = len(stage.layer_numbers), cast(PipelineStage, _WithoutLayers(stage))
        yield self._entry(model, ModelPart.LAYER, stage, MIDDLE, layers)
        if stage.is_first:
            yield self._entry(model, ModelPart.EMBEDDING, ends, FIRST, 1)
        if stage.is_last:
            yield self._entry(model, ModelPart.HEAD, ends, LAST, 1)

    def _entry(self, model: str, part: ModelPart, stage: PipelineStage, place: _Place, count: int) -> Figures:
        times: list[dict[str, float]] = []
        for samples in sample_counts(self._trainer, self._batch):
            whole = self._seconds(model, stage, place, samples)
            seconds = max((whole - self.constant) / count, LEAST_SECONDS)
            rows = range(samples)
            tokens = sum(self._batch.lengths[row] for row in rows)
            trained = int(self._batch.mask[:samples].sum())
            times.append({"tokens": trained if part is ModelPart.HEAD else tokens, "seconds": seconds})
            if whole > PART_SECONDS:
                break
        return {"role": model, "part": str(part), "source": "measured", "times": times}

    def start_seconds(self, model: str, stage: PipelineStage) -> float:
        """Return by how many seconds the first micro-batch after a pause is slower than later ones."""
        run = self._run(model, stage, MIDDLE, sample_counts(self._trainer, self._batch)[0])
        usual, firsts = run.usual_seconds(), []
        swept = torch.ones(COPIED_BYTES[self._trainer.device.type], dtype=torch.uint8, device=self._trainer.device)
        for _ in range(REPEATS if usual * REPEATS < PART_SECONDS else 1):
            swept.add_(1)
            time.sleep(PAUSE_SECONDS)
            firsts.append(run(1))
        return max(0.0, min(firsts) - usual)

    def _seconds(self, model: str, stage: PipelineStage, place: _Place, samples: int) -> float:
        """Return the seconds of a micro-batch's forward and backward; see `usual_seconds`."""
        return self._run(model, stage, place, samples).usual_seconds()

    def _run(self, model: str, stage: PipelineStage, place: _Place, samples: int) -> "_TimedPasses":
        trainer, rows = self._trainer, list(range(samples))
        weights = trainer.algorithm.token_weights(self._batch, rows)
        cell = micro_batch(self._batch, rows, weights, trainer.spec.training.packing).to(trainer.device)
        work = {0: StageWork(place.stages, {place.stage: stage}, [cell], self._losses[model], trainer.compute)}
        return _TimedPasses(trainer, work, stage_row(0, place.stage, place.stages, "B"))


@dataclass(frozen=True)
class _TimedPasses:
    """Forward and backward passes of one stage and micro-batch."""

    trainer: Trainer
    work: Mapping[int, StageWork]
    row: Sequence[Action]

    def usual_seconds(self) -> float:
        """Return the mean seconds of a pass in the shortest run, after one pass to warm up."""
        count = IN_A_ROW if self(1) * IN_A_ROW < PART_SECONDS else 1
        return shortest(partial(self, count), warm=True)

    def __call__(self, count: int) -> float:
        """Return the mean seconds of a pass, from `count` passes in a row."""
        with shared_casts(self.trainer.device, self.trainer.compute):
            passes = [run_stage(self.trainer, self.work, self.row) for _ in range(count)]
        return sum(seconds for each in passes for seconds in each.values()) / count


def sample_counts(trainer: Trainer, batch: TrainingBatch) -> list[int]:
    """Return rising numbers of samples to time: a quarter, half and all of the job's micro-batch, on a CPU also twice
    that.
    """
    asked, most = trainer.spec.training.micro_batch_size, len(batch.prompts)
    unit = trainer.spec.algorithm.fields.samples_per_unit
    counts = [asked // 4, asked // 2, asked, *([2 * asked] if trainer.device.type == "cpu" else [])]
    return sorted({min(max(1, count // unit) * unit, most) for count in counts})
