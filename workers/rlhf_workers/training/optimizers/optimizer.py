"""AdamW over the parameters of one stage, its learning rate as a function of the step, and its gradients in one array.

The parameters' `.grad` are views of the array. Parameters that another stage or rank counts come last.
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
"""Gradients per norm computation on a GPU. A CPU uses one sum."""


@dataclass(frozen=True)
class Horizon:
    """End of Linear and Cosine schedules, and the progress so far; saved in trainer.json.

    When the job's number of iterations changes, the rest of the decay is spread over the remaining steps, so the rate
    does not jump.
    """

    total: int
    """Optimizer steps of the whole job."""
    start: int = 0
    """Step from which `total` applies."""
    done: float = 0.0
    """Share of the decay completed at `start`."""

    def share(self, step: int, warmup: int) -> float:
        """Return the share of the decay, 0 to 1, completed at `step` (at least `warmup`)."""
        start = max(self.start, warmup)
        return min(1.0, self.done + (1.0 - self.done) * (step - start) / max(1, self.total - start))

    def changed(self, total: int, step: int, warmup: int) -> "Horizon":
        """Return the horizon that applies from `step` on; `total`: optimizer steps of the whole job."""
        return Horizon(total, step, self.share(step, warmup) if step > warmup else 0.0)


def learning_rate(fields: Optimizer, peak: float, step: int, horizon: Horizon, skipped: int = 0) -> float:
    """Return the learning rate of optimizer step `step` (from 0): linear warm-up, then the schedule.

    A model that skipped the first `skipped` steps warms up from its own first step, until it meets the schedule.
    """
    own = step - skipped
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
    """Suffix of this rank's files of a stage that several ranks hold in parts; empty: it holds the whole stage."""
    over_data = False
    """Whether each data parallel rank has its own part, whose gradients the backward has summed."""

    def __init__(
        self,
        stage: PipelineStage,
        fields: Optimizer,
        shares: MomentShares = WHOLE,
        offload: bool = False,
    ) -> None:
        """`offload`: keep moments in host memory."""
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
        """Names of the parameters that this copy of the stage steps, and for which it has moments."""
        self._device = next(iter(self.parameters.values())).device
        self.gradients = torch.empty(0)
        self._views: dict[str, torch.Tensor] = {}
        self.make_gradients()
        stepped = {name: value for name, value in self.parameters.items() if name in self.stepped}
        self._adamw = adamw_of(stepped, fields, self._device, offload)

    def _trained(self, stage: PipelineStage) -> dict[str, torch.Tensor]:
        """Return the parameters of a stage that this rank trains: name -> leaf of autograd."""
        return {name: value for name, value in stage.named_parameters() if value.requires_grad}

    def _counted_elsewhere(self, stage: PipelineStage) -> frozenset[str]:
        """Return the parameters on this rank that another rank counts in the norm."""
        return frozenset()

    def sum_copies(self, communicator: Communicator, holders: tuple[int, ...], by_experts: tuple[int, ...]) -> None:
        """Sum the gradients over the copies: `holders` are those of the whole stage, `by_experts` those with the same
        experts."""
        communicator.all_reduce_sum(self.gradients, holders)

    def sum_parts(self, communicator: Communicator) -> None:
        """Sum gradients that are distributed over a tensor group; the group calls this together."""

    def share_updates(self, communicator: Communicator) -> None:
        """Update the copies of a stage that share its moments after a step, one parameter at a time in a fixed order;
        they call this together."""
        holders = self.shares.holders
        for name, number in self._steppers.items() if len(holders) > 1 else ():
            communicator.broadcast(self.parameters[name].detach(), holders[number], holders)

    def gather(self, communicator: Communicator) -> None:
        """Update whole parameters of which ranks hold parts; those ranks call this together."""

    def make_gradients(self) -> None:
        """Allocate the gradients, all zero, on the stage's device."""
        values = self.parameters.values()
        self.gradients = torch.zeros(sum(value.numel() for value in values), device=self._device)
        offset = 0
        for name, value in self.parameters.items():
            self._views[name] = self.gradients[offset : offset + value.numel()].view_as(value)
            value.grad = self._views[name]
            offset += value.numel()

    def drop_gradients(self) -> None:
        """Free the gradients' memory; between two trainings they are zero."""
        for value in self.parameters.values():
            value.grad = None
        self._views.clear()
        self.gradients = torch.empty(0)

    @property
    def host_bytes(self) -> int:
        """Bytes of moments in host memory."""
        return self._adamw.host_bytes

    def moments(self) -> Iterator[torch.Tensor]:
        """Return the moments on the device, for every parameter stepped here, including copies."""
        return self._adamw.on_device()

    def gradient(self, name: str) -> torch.Tensor:
        """Return a view of one parameter's gradient."""
        return self._views[name]

    def norm_squared(self) -> torch.Tensor:
        """Return the sum of squares over the gradients that this rank counts, float64 scalar."""
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
        """Return `<Hugging Face name>.exp_avg` and `.exp_avg_sq` of the parameters that it owns and steps; zeros before
        the first."""
        result = {}
        for name in self._stepped_names():
            for moment, value in self._adamw.moments(name).items():
                for saved, part in self._stage.in_folder(name, value):
                    result[f"{saved}.{moment}"] = part
        return result

    def _stepped_names(self) -> tuple[str, ...]:
        """Return the parameters that it owns and has moments for."""
        return tuple(name for name in self.owned if name in self.stepped)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, master weight) of the parameters that it owns, each read on demand."""
        for name in self.owned:
            yield from self._stage.in_folder(name, self.parameters[name].detach())

    def load_state(self, tensors: TensorFolder, steps: int) -> None:
        """Load the moments of every parameter that it steps, including copies, after `steps` steps. Raises WorkError if
        one is missing."""
        for name in self.stepped:
            self._adamw.take(name, partial(self._read, tensors, name), steps)

    def _read(self, tensors: TensorFolder, name: str, moment: str) -> torch.Tensor:
        """Return the moment of the held part of a parameter; the whole moment is in memory temporarily."""
        return self._stage.of_folder(name, partial(moment_of, tensors, moment))


def moment_of(tensors: TensorFolder, moment: str, name: str, shape: torch.Size) -> torch.Tensor:
    """Return a moment of a whole parameter, assembled if ranks wrote parts of it."""
    return read_parts(tensors, f"{name}.{moment}", shape)
