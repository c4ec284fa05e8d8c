"""AdamW over the parameters of one stage, its learning rate as a function of the step, and its gradients in one array.

All gradients of a stage live in one flat float32 array that the parameters' `.grad` are views of: summing over
replicas is one call, the norm one reduction, zeroing one fill. Parameters that another stage owns (a tied embedding's
copy), or that another rank of a tensor group counts, come last, so the norm over the first `counted` elements counts
every parameter of the model once. Moments are of the parameters that this copy steps: all, or its share
(`shared_moments`); where they lie is `adamw`'s.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from rlhf_api.job.groups import Optimizer
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.optimizers.adamw import adamw_of
from rlhf_workers.training.optimizers.shared_moments import WHOLE, MomentShares
from rlhf_workers.training.parallel.tensor_parts import read_parts
from rlhf_workers.training.stages.pipeline_stage import PipelineStage
from rlhf_workers.weights.tensor_file import TensorFolder

NORM_CHUNK: Final = 16 * 1024 * 1024
"""Gradients whose norm is taken at a time on a GPU: PyTorch first copies them as float64, twice the gradients' memory
if it were done at once. On a CPU one sum, in the order that jobs of before had."""


@dataclass(frozen=True)
class Horizon:
    """Where Linear and Cosine schedules end, and what is behind them: saved in trainer.json.

    When the job gets another number of iterations, what is left of the fall is stretched or pressed over the steps that
    are left, so the rate bends and never jumps.
    """

    total: int
    """Optimizer steps of the whole job."""
    start: int = 0
    """The step from which `total` holds."""
    done: float = 0.0
    """Share of the fall that was behind by then."""

    def share(self, step: int, warmup: int) -> float:
        """Return the share of the fall, 0 to 1, that is behind at `step` (at least `warmup`)."""
        start = max(self.start, warmup)
        return min(1.0, self.done + (1.0 - self.done) * (step - start) / max(1, self.total - start))

    def changed(self, total: int, step: int, warmup: int) -> "Horizon":
        """Return the horizon of a job that has `total` steps from `step` on."""
        return Horizon(total, step, self.share(step, warmup) if step > warmup else 0.0)


def learning_rate(fields: Optimizer, peak: float, step: int, horizon: Horizon, held: int = 0) -> float:
    """Return the learning rate of optimizer step `step` (from 0): linear warm-up, then the shape.

    Linear and Cosine fall to minLearningRateRatio of the peak at the end of the job. A model that took no part in the
    first `held` steps rises from its own first one, until it meets the shape.
    """
    own = step - held
    if own < fields.warmup_steps:
        rising = peak * (own + 1) / fields.warmup_steps
        return rising if step < fields.warmup_steps else min(rising, _shaped(fields, peak, step, horizon))
    return _shaped(fields, peak, step, horizon)


def _shaped(fields: Optimizer, peak: float, step: int, horizon: Horizon) -> float:
    if fields.schedule == "Constant":
        return peak
    done = horizon.share(step, fields.warmup_steps)
    shape = 1.0 - done if fields.schedule == "Linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (fields.min_learning_rate_ratio + (1.0 - fields.min_learning_rate_ratio) * shape)


def _norm_squared(values: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()


class StageOptimizer:
    """Gradients and AdamW state of one stage."""

    part = ""
    """Ends the names of this rank's files of a stage that several ranks hold parts of; empty: it holds all of it."""
    over_data = False
    """Whether each data parallel rank has a part of its own, whose gradients the backward has summed."""

    def __init__(
        self,
        stage: PipelineStage,
        fields: Optimizer,
        shares: MomentShares = WHOLE,
        offload: bool = False,
    ) -> None:
        """`offload`: moments are kept in host memory."""
        named = self._trained(stage)
        owned = {name: value for name, value in named.items() if name not in stage.duplicates}
        elsewhere = stage.duplicates | self._counted_elsewhere(stage)
        counted = {name: value for name, value in named.items() if name not in elsewhere}
        self._stage, self.shares = stage, shares
        self.owned = tuple(owned)
        self.parameters: dict[str, torch.Tensor] = {**counted, **owned, **named}
        self.counted = sum(parameter.numel() for parameter in counted.values())
        self._steppers = shares.steppers(self.parameters)
        self.stepped = frozenset(name for name, number in self._steppers.items() if number == shares.number)
        """Names of what this copy of the stage steps, and keeps moments of."""
        self._device = next(iter(self.parameters.values())).device
        self.gradients = torch.empty(0)
        self._views: dict[str, torch.Tensor] = {}
        self.make_gradients()
        stepped = {name: value for name, value in self.parameters.items() if name in self.stepped}
        self._adamw = adamw_of(stepped, fields, self._device, offload)

    def _trained(self, stage: PipelineStage) -> dict[str, torch.Tensor]:
        """Return what this rank trains of a stage: parameter name -> leaf of autograd."""
        return {name: value for name, value in stage.named_parameters() if value.requires_grad}

    def _counted_elsewhere(self, stage: PipelineStage) -> frozenset[str]:
        """Return what it owns, and another rank counts in the norm."""
        return frozenset()

    def sum_copies(self, communicator: Communicator, holders: tuple[int, ...], by_experts: tuple[int, ...]) -> None:
        """Add up the gradients over the copies: `holders` are all of the stage, `by_experts` those of them that hold
        the same experts."""
        communicator.all_reduce_sum(self.gradients, holders)

    def sum_parts(self, communicator: Communicator) -> None:
        """Add up the gradients of which every rank of a tensor group has a part; the group calls it together."""

    def share_updates(self, communicator: Communicator) -> None:
        """Bring the copies of a stage that share its moments up to date after a step, one parameter at a time and in
        one order; they call it together."""
        holders = self.shares.holders
        for name, number in self._steppers.items() if len(holders) > 1 else ():
            communicator.broadcast(self.parameters[name].detach(), holders[number], holders)

    def gather(self, communicator: Communicator) -> None:
        """Bring whole parameters up to date where ranks hold parts of them; those ranks call it together."""

    def make_gradients(self) -> None:
        """Make the gradients, all zero, on the stage's device."""
        values = self.parameters.values()
        self.gradients = torch.zeros(sum(value.numel() for value in values), device=self._device)
        offset = 0
        for name, value in self.parameters.items():
            self._views[name] = self.gradients[offset : offset + value.numel()].view_as(value)
            value.grad = self._views[name]
            offset += value.numel()

    def drop_gradients(self) -> None:
        """Free the gradients' memory; between two trainings they are zero, so nothing is lost."""
        for value in self.parameters.values():
            value.grad = None
        self._views.clear()
        self.gradients = torch.empty(0)

    @property
    def host_bytes(self) -> int:
        """Bytes of moments that are kept in host memory."""
        return self._adamw.host_bytes

    def moments(self) -> Iterator[torch.Tensor]:
        """Return the moments, on the device, of every parameter that was stepped here, copies included."""
        return self._adamw.on_device()

    def gradient(self, name: str) -> torch.Tensor:
        """Return a view of one parameter's gradient."""
        return self._views[name]

    def norm_squared(self) -> torch.Tensor:
        """Return the sum of squares over the parameters this stage owns, float64 scalar."""
        counted = self.gradients[: self.counted]
        if self._device.type == "cpu":
            return _norm_squared(counted)
        return torch.stack([_norm_squared(part) for part in counted.split(NORM_CHUNK)]).sum()

    def step(self, rate: float, scale: float) -> None:
        """Take one AdamW step with gradients x `scale`, then zero them."""
        if scale != 1.0:
            self.gradients.mul_(scale)
        self._adamw.step(rate)
        self.gradients.zero_()

    def state(self) -> dict[str, torch.Tensor]:
        """Return `<Hugging Face name>.exp_avg` and `.exp_avg_sq` of what it owns and steps; zeros before the first."""
        result = {}
        for name in self._kept():
            for moment, value in self._adamw.moments(name).items():
                for saved, part in self._stage.in_folder(name, value):
                    result[f"{saved}.{moment}"] = part
        return result

    def _kept(self) -> tuple[str, ...]:
        """Return what it owns, and has the moments of."""
        return tuple(name for name in self.owned if name in self.stepped)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, master weight) of what it owns, each read when it is asked for."""
        for name in self.owned:
            yield from self._stage.in_folder(name, self.parameters[name].detach())

    def load_state(self, tensors: TensorFolder, steps: int) -> None:
        """Take the moments of every parameter that it steps, copies included, as of `steps` steps; WorkError when one
        is missing."""
        for name in self.stepped:
            self._adamw.take(name, partial(self._read, tensors, name), steps)

    def _read(self, tensors: TensorFolder, name: str, moment: str) -> torch.Tensor:
        """Return a moment of what it holds of a parameter; a whole one is in memory meanwhile."""
        return self._stage.of_folder(name, partial(moment_of, tensors, moment))


def moment_of(tensors: TensorFolder, moment: str, name: str, shape: torch.Size) -> torch.Tensor:
    """Return a moment of a whole parameter, put together where ranks wrote parts of it."""
    return read_parts(tensors, f"{name}.{moment}", shape)
