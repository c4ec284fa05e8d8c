"""Searches the best plans of up to N devices. Rule: pure.

Beyond WORKERS and SCORERS only some counts of workers are considered. `forecasts` must never return a plan that
validation refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from rlhf_api.device_sizes import device_use
from rlhf_planner.plan_search.cost_figures import CostFigure, PlanCosts
from rlhf_planner.plan_search.device_plan import CriticOverlap, DevicePlan, Placement, devices_of
from rlhf_planner.plan_search.iteration_forecast import HalvesCombiner, PlanForecast, RolloutHalf, TrainingHalf
from rlhf_planner.plan_search.phase_memory import phase_memory
from rlhf_planner.plan_search.rollout_choices import RolloutChoices, RolloutWorkers
from rlhf_planner.plan_search.training_choices import TrainingChoices, own_training
from rlhf_planner.plan_search.workload import Workload

EXHAUSTIVE: Final = 64
"""Devices up to which every count of training ranks is considered, and no plan is tried at random."""
WORKERS: Final = 16
"""Generation workers up to which every count is considered."""
SCORERS: Final = 4
"""Inference workers up to which every count is considered."""
PER_OCTAVE: Final = 8
"""Counts between two powers of two that are considered beyond these; a quarter of it for inference workers."""
BEST: Final = 5
"""Maximum number of plans that are returned."""
SPARE: Final = 4
"""Factor of BEST up to which plans are collected, in case validation refuses some."""


@dataclass(frozen=True)
class Candidate:
    """A pair of halves with its predicted seconds."""

    seconds: float
    devices: int
    placement: Placement
    workers: RolloutWorkers
    ranks: int
    critic_overlap: CriticOverlap

    @property
    def order(self) -> tuple[float, int, str, RolloutWorkers, int]:
        """Order of candidates: seconds, then devices, then a fixed order."""
        return self.seconds, self.devices, self.placement, self.workers, self.ranks


def counts_up_to(limit: int, dense: int = EXHAUSTIVE, per_octave: int = PER_OCTAVE) -> list[int]:
    """Return the counts that are considered: all up to `dense`, then about `per_octave` in each doubling.

    The counts up to a smaller limit are among them.
    """
    counts = list(range(1, min(limit, dense) + 1))
    start = dense
    while start < limit:
        step = max(1, start // per_octave)
        counts += [count for count in range(start + step, 2 * start + 1, step) if count <= limit]
        start *= 2
    return counts


class PlanSearch:
    """Evaluates plans of one workload.

    `accepts` says whether validation accepts a plan.
    """

    def __init__(
        self,
        workload: Workload,
        costs: PlanCosts,
        device_bytes: int | None,
        accepts: Callable[[DevicePlan], bool] = lambda plan: True,
    ) -> None:
        self.workload, self.costs, self._accepts = workload, costs, accepts
        self.rollouts = RolloutChoices(workload, costs, device_bytes)
        self.trainings = TrainingChoices(workload, costs, device_bytes)
        self.combination = HalvesCombiner(workload, costs)
        self.placements = _placements(workload, accepts)
        self._fronts: dict[tuple[Placement, int], list[tuple[int, TrainingHalf]]] = {}

    # ---------------------------------------------------------------- candidates

    def exhaustive(self, devices: int) -> list[Candidate]:
        """Return at most BEST * SPARE candidates of up to so many devices, with the BEST fastest ones first."""
        bounded = [
            (self._bound(placement, workers, devices), placement, workers)
            for placement in self.placements
            for workers in self.workers(placement, devices)
        ]
        found: list[Candidate] = []
        for bound, placement, workers in sorted(bounded):
            if math.isinf(bound) or (len(found) >= BEST and bound > found[BEST - 1].seconds):
                break
            candidate = self.candidate(placement, workers, devices)
            if candidate is not None:
                found = sorted([*found, candidate], key=lambda each: each.order)[: BEST * SPARE]
        return found

    def workers(self, placement: Placement, devices: int) -> Iterator[RolloutWorkers]:
        """Yield the workers of a rollout that are tried on up to so many devices."""
        counts = self.rollouts.generation_counts(counts_up_to(devices, WORKERS))
        scorers = counts_up_to(devices, SCORERS, PER_OCTAVE // 4)
        sizes = self.rollouts.tensor_sizes
        if placement == "Colocated" and self.workload.on_gpus:
            sizes = tuple(size for size in sizes if size == 1)  # a rank trains on one device
        for tensor in sizes:
            use = device_use(self.workload.spec, tensor)
            for generation in counts:
                left = devices - generation * use.generation - (use.training if placement == "Dedicated" else 0)
                if left < 0:
                    break
                for inference in self.rollouts.inference_counts(scorers):
                    if inference * use.inference > left:
                        break
                    for batch in self.rollouts.batch_sizes(placement, generation, inference, tensor):
                        yield RolloutWorkers(generation, inference, tensor, batch)

    def candidate(self, placement: Placement, workers: RolloutWorkers, devices: int) -> Candidate | None:
        """Return the best plan with these workers on up to so many devices; None if no training fits."""
        rollout = self.rollouts.half(workers)
        best: Candidate | None = None
        for ranks, training in reversed(self._front(placement, self._ranks_left(placement, workers, devices))):
            for overlap in self.overlaps(placement):
                exposed = self._exposed if overlap != "Disabled" else self.trainings.seconds
                least = self._iteration_bound(rollout.forecast.seconds, exposed(placement, training))
                if best is not None and least > best.seconds:
                    continue
                seconds = self.combination.seconds(placement, rollout, training, overlap)[0]
                own = self.rollouts.devices(workers)
                own += ranks * training.settings.devices_per_rank if placement == "Dedicated" else 0
                tried = Candidate(seconds, own, placement, workers, ranks, overlap)
                if best is None or tried.order < best.order:
                    best = tried
        return best

    def overlaps(self, placement: Placement) -> tuple[CriticOverlap, ...]:
        """Return the modes of critic overlap that the job may have with a placement."""
        spec = self.workload.spec
        if "Training" in self.workload.fixed:
            return (spec.training.critic_overlap,)
        possible = placement == "Dedicated" and len(self.workload.trained) > 1
        fused = spec.fusion.intra_stage.mode in ("Fused", "FusedSplit")
        if possible and not fused and spec.rollout.overlap_training == "Disabled":
            return ("Disabled", "Auto")
        return ("Disabled",)

    def _ranks_left(self, placement: Placement, workers: RolloutWorkers, devices: int) -> int:
        if placement == "Colocated":
            return workers.generation_workers
        use = device_use(self.workload.spec, workers.engine_tensor)
        return (devices - self.rollouts.devices(workers)) // use.training

    def _front(self, placement: Placement, ranks: int) -> list[tuple[int, TrainingHalf]]:
        """Return the trainings of up to so many ranks that are faster than all of fewer, in total or for the policy."""
        key = (placement, ranks)
        if key not in self._fronts:
            front: list[tuple[int, TrainingHalf]] = []
            total = policy = math.inf
            for count in self.trainings.counts(counts_up_to(ranks)):
                half = self.trainings.best(placement, count) if count <= ranks else None
                if half is None:
                    continue
                seconds, least = self.trainings.seconds(placement, half), self._exposed(placement, half)
                if seconds < total or least < policy:
                    front.append((count, half))
                total, policy = min(total, seconds), min(policy, least)
            self._fronts[key] = front
        return self._fronts[key]

    def _exposed(self, placement: Placement, half: TrainingHalf) -> float:
        """Return the seconds of training that no mode hides."""
        if self.overlaps(placement) == ("Disabled",):
            return self.trainings.seconds(placement, half)
        return half.times.of_model(str(self.workload.trained[0]))

    def _bound(self, placement: Placement, workers: RolloutWorkers, devices: int) -> float:
        """Return seconds below which no plan with these workers is; infinite if no training fits."""
        front = self._front(placement, self._ranks_left(placement, workers, devices))
        if not front:
            return math.inf
        training = min(self._exposed(placement, half) for _, half in front)
        return self._iteration_bound(self.rollouts.bound(workers), training)

    def _iteration_bound(self, rollout: float, training: float) -> float:
        """Return the seconds of a rollout and of the training that is not hidden, without publishing."""
        parallel = self.workload.spec.rollout.overlap_training == "Enabled"
        return max(rollout, training) if parallel else rollout + training

    # ---------------------------------------------------------------- forecasts

    def plan_of(self, candidate: Candidate) -> DevicePlan:
        """Return the plan of a candidate."""
        training = self.trainings.best(candidate.placement, candidate.ranks)
        assert training is not None, "a candidate has a training"
        return device_plan(candidate.placement, candidate.workers, training, candidate.critic_overlap)

    def forecasts(self, candidates: Sequence[Candidate], most: int = BEST) -> list[PlanForecast]:
        """Return the forecasts of the first candidates that validation accepts."""
        found: list[PlanForecast] = []
        for candidate in candidates:
            if len(found) == most:
                break
            plan = self.plan_of(candidate)
            if self._accepts(plan):
                training = self.trainings.best(candidate.placement, candidate.ranks)
                assert training is not None, "a candidate has a training"
                found.append(self.forecast(plan, self.rollouts.half(candidate.workers), training))
        return found

    def forecast(self, plan: DevicePlan, rollout: RolloutHalf, training: TrainingHalf) -> PlanForecast:
        """Return the forecast of a plan with these halves."""
        seconds, publish, moves = self.combination.seconds(plan.placement, rollout, training, plan.critic_overlap)
        work = rollout.forecast
        stages = {
            "generate": CostFigure(work.generation_seconds, rollout.source),
            "score": CostFigure(work.seconds - work.generation_seconds, rollout.source),
            "train": CostFigure(training.times.total, training.times.source),
            "publish": publish,
        } | ({"switch": moves} if plan.placement == "Colocated" else {})
        memory = phase_memory(self.workload, plan)
        devices = devices_of(self.workload.spec, plan)
        return PlanForecast(plan, devices, seconds, stages, training.times, work, memory)

    @cached_property
    def own(self) -> PlanForecast:
        """Forecast of the job's own plan, whether it fits or not."""
        plan = DevicePlan.from_spec(self.workload.spec)
        workers = RolloutWorkers(
            plan.generation_workers, plan.inference_workers, plan.engine_tensor, plan.max_batch_size
        )
        memory = phase_memory(self.workload, plan)["training"]
        return self.forecast(plan, self.rollouts.half(workers), own_training(self.workload, self.costs, memory))


def device_plan(
    placement: Placement, workers: RolloutWorkers, training: TrainingHalf, critic_overlap: CriticOverlap
) -> DevicePlan:
    """Return the plan with these workers and this training."""
    settings = training.settings
    return DevicePlan(
        placement, workers.generation_workers, workers.engine_tensor, workers.max_batch_size,
        workers.inference_workers, settings.parallelism, settings.micro_batch_size,
        settings.activation_checkpointing, critic_overlap,
    )  # fmt: skip


def _placements(workload: Workload, accepts: Callable[[DevicePlan], bool]) -> tuple[Placement, ...]:
    """Return the placements with which validation accepts the smallest plan of the job."""
    own = DevicePlan.from_spec(workload.spec)
    single = own.parallelism.model_copy(
        update={"pipeline": 1, "data": 1, "context": 1, "tensor": 1, "shard": 1, "expert": 1, "critic_tensor": None,
                "sequence_parallel": "Disabled", "shard_optimizer": False}
    )  # fmt: skip
    smallest = replace(
        own, generation_workers=1, engine_tensor=1, parallelism=single, critic_overlap="Disabled", inference_workers=0
    )
    placements: tuple[Placement, ...] = ("Dedicated", "Colocated")
    if "Placement" in workload.fixed:
        placements = (own.placement,)
    return tuple(each for each in placements if accepts(replace(smallest, placement=each)))
