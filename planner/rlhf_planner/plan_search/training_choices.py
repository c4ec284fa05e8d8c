"""The fastest training of a number of ranks: layout, micro-batch, recomputation and offload that fit a device.

Rule: pure; independent of all other groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from rlhf_api.device_sizes import device_use
from rlhf_api.job import RLHFJobSpec
from rlhf_planner.device_memory import Estimate
from rlhf_planner.plan_search.cost_figures import PlanCosts
from rlhf_planner.plan_search.device_plan import DevicePlan, Placement
from rlhf_planner.plan_search.iteration_forecast import HalvesCombiner, TrainingHalf
from rlhf_planner.plan_search.phase_memory import phase_memory, with_activations
from rlhf_planner.plan_search.training_seconds import TrainingSettings, training_times
from rlhf_planner.plan_search.workload import Workload
from rlhf_planner.training_layouts import TrainingLayout, layouts

MICRO_BATCH_FACTORS: Final = (1, 2, 4, 8, 0.5, 0.25, 0.125)
"""Sizes of micro-batches that are tried, relative to the job's."""


class TrainingChoices:
    """Best training of each number of ranks, computed once."""

    def __init__(self, workload: Workload, costs: PlanCosts, device_bytes: int | None) -> None:
        self._workload, self._costs, self._device_bytes = workload, costs, device_bytes
        self._combination = HalvesCombiner(workload, costs)
        self._best: dict[tuple[Placement, int], TrainingHalf | None] = {}

    def best(self, placement: Placement, ranks: int) -> TrainingHalf | None:
        """Return the fastest training of exactly so many ranks; None if no layout fits."""
        key = (placement, ranks)
        if key not in self._best:
            found = sorted(self.fitting(placement, ranks), key=lambda half: self._order(placement, half))
            self._best[key] = found[0] if found else None
        return self._best[key]

    def counts(self, counts: Sequence[int]) -> Sequence[int]:
        """Return the numbers of ranks that are tried."""
        own = self._workload.spec.training.ranks
        return [own] if "Training" in self._workload.fixed else counts

    def seconds(self, placement: Placement, half: TrainingHalf) -> float:
        """Return the seconds that depend on the training alone: those of moves too, where ranks are colocated."""
        moves = self._combination.moves(half).value if placement == "Colocated" else 0.0
        return half.times.total + moves

    def _order(self, placement: Placement, half: TrainingHalf) -> tuple[float, int, int, str]:
        """Return the order of choices: seconds, memory, nearness to the job's micro-batch, then a fixed order."""
        asked = self._workload.spec.training.micro_batch_size
        size = half.settings.micro_batch_size
        distance = max(size, asked) // max(1, min(size, asked))
        return self.seconds(placement, half), half.memory.total, distance, half.settings.parallelism.model_dump_json()

    def fitting(self, placement: Placement, ranks: int) -> Iterator[TrainingHalf]:
        """Yield a training for each layout of so many ranks and each micro-batch of MICRO_BATCH_FACTORS with which one
        fits; only the job's own where the job fixes it."""
        if "Training" in self._workload.fixed:
            yield from self._fixed(placement, ranks)
            return
        spec = self._workload.spec.model_copy(update={"placement": placement})
        asked, mini_batch = spec.training.micro_batch_size, spec.algorithm.fields.mini_batch_size
        smallest = spec.training.model_copy(update={"micro_batch_size": 1})  # its layouts include those of larger ones
        found = layouts(spec.model_copy(update={"training": smallest}), self._workload.sizes, ranks)
        half = len(found) // 2  # the second half is the first with moments in host memory
        sizes = dict.fromkeys(int(asked * factor) for factor in MICRO_BATCH_FACTORS if asked * factor >= 1)
        for layout, offloaded in zip(found[:half], found[half:], strict=True):
            for size in sizes:
                if mini_batch % (size * layout.parallelism.data):
                    continue
                choice = self._first_that_fits(layout, offloaded, size)
                if choice is not None:
                    yield choice

    def _fixed(self, placement: Placement, ranks: int) -> Iterator[TrainingHalf]:
        """Yield the job's own training if it has so many ranks and fits."""
        plan = replace(DevicePlan.from_spec(self._workload.spec), placement=placement)
        if ranks != plan.parallelism.ranks:
            return
        own = own_training(self._workload, self._costs, phase_memory(self._workload, plan)["training"])
        if self._device_bytes is None or own.memory.total <= self._device_bytes:
            yield own

    def _first_that_fits(
        self, layout: TrainingLayout, offloaded: TrainingLayout, micro_batch_size: int
    ) -> TrainingHalf | None:
        use = device_use(self._workload.spec, 1).training
        for recompute in (self._workload.spec.training.activation_checkpointing, True):
            for tried in (layout, offloaded):
                settings = TrainingSettings(tried.parallelism, micro_batch_size, recompute, use)
                memory = tried.memory
                if self._device_bytes is not None:
                    memory = with_activations(self._workload, memory, settings)
                if self._device_bytes is None or memory.total <= self._device_bytes:
                    return TrainingHalf(settings, training_times(self._workload, self._costs, settings), memory)
        return None


def own_settings(spec: RLHFJobSpec) -> TrainingSettings:
    """Return the settings of a job's own layout."""
    training = spec.training
    return TrainingSettings(
        training.parallelism, training.micro_batch_size, training.activation_checkpointing,
        device_use(spec, 1).training,
    )  # fmt: skip


def own_training(workload: Workload, costs: PlanCosts, memory: Estimate) -> TrainingHalf:
    """Return the training of the job's own layout, whether it fits or not."""
    settings = own_settings(workload.spec)
    return TrainingHalf(settings, training_times(workload, costs, settings), memory)
