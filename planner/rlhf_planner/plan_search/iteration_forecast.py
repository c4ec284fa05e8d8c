"""Seconds of a whole iteration of a plan, from the forecasts of its two halves.

Critics, or all training, may train beside the next decoding on dedicated devices. Colocated roles also move between
device and host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rlhf_api.device_sizes import device_use
from rlhf_planner import critic_overlap, rollout_overlap
from rlhf_planner.critic_overlap import OverlapTimes
from rlhf_planner.device_memory import Estimate
from rlhf_planner.plan_search.context_switch import switch_seconds
from rlhf_planner.plan_search.cost_figures import NOTHING, CostFigure, FigureSource, PlanCosts, weakest
from rlhf_planner.plan_search.device_plan import CriticOverlap, DevicePlan, Placement
from rlhf_planner.plan_search.phase_memory import Phase
from rlhf_planner.plan_search.publishing import Readers, publish_seconds
from rlhf_planner.plan_search.rollout_forecast import RolloutForecast
from rlhf_planner.plan_search.training_seconds import TrainingSettings, TrainingTimes
from rlhf_planner.plan_search.workload import Workload


@dataclass(frozen=True)
class RolloutHalf:
    """Generation and scoring workers with their forecast."""

    generation_workers: int
    inference_workers: int
    engine_tensor: int
    max_batch_size: int
    forecast: RolloutForecast
    source: FigureSource


@dataclass(frozen=True)
class TrainingHalf:
    """Training ranks with their forecast."""

    settings: TrainingSettings
    times: TrainingTimes
    memory: Estimate
    """Memory of a rank. Layouts that a search tries without a device's memory leave out activations."""


@dataclass(frozen=True)
class PlanForecast:
    """Predicted iteration of a plan."""

    plan: DevicePlan
    devices: int
    seconds: float
    """Seconds of one iteration."""
    stages: Mapping[str, CostFigure]
    """generate, score, train, publish and, where ranks are colocated, switch: seconds. Their sum may exceed `seconds`
    where stages overlap.
    """
    training: TrainingTimes
    rollout: RolloutForecast
    memory: Mapping[Phase, Estimate]

    @property
    def source(self) -> FigureSource:
        """Source of the prediction."""
        return weakest(figure.source for figure in self.stages.values())

    @property
    def bound(self) -> str:
        """Stage that takes the most seconds; for training, also its most expensive purpose."""
        stage = max(self.stages, key=lambda name: self.stages[name].value)
        return f"train: {self.training.bound}" if stage == "train" else stage


class HalvesCombiner:
    """Combines halves to iterations of one workload."""

    def __init__(self, workload: Workload, costs: PlanCosts) -> None:
        self.workload, self.costs = workload, costs

    @cached_property
    def late_share(self) -> float:
        """Share of the scorers' parameters in models that are trained besides the policy."""
        late = {str(role) for role in self.workload.trained[1:]}
        whole = sum(model.size.parameters for model in self.workload.scorers)
        mine = sum(model.size.parameters for model in self.workload.scorers if model.role in late)
        return mine / whole if whole else 0.0

    def seconds(
        self, placement: Placement, rollout: RolloutHalf, training: TrainingHalf, overlap: CriticOverlap
    ) -> tuple[float, CostFigure, CostFigure]:
        """Return (seconds of an iteration, of publishing, of moves)."""
        publish = self._publish(placement, rollout, training)
        moves = self.moves(training) if placement == "Colocated" else NOTHING
        train, work = training.times.total, rollout.forecast
        if self.workload.spec.rollout.overlap_training == "Enabled":
            both = rollout_overlap.RolloutTimes(work.seconds, train, publish.value)
            return rollout_overlap.overlapped(both), publish, moves
        seconds = work.seconds + train + publish.value + moves.value
        if overlap != "Disabled":
            times = self._overlap(work, training.times, publish.value)
            gain = critic_overlap.unchanged(times) - critic_overlap.overlapped(times)
            seconds -= max(0.0, gain) if overlap == "Auto" else gain  # Auto returns to training all at once
        return seconds, publish, moves

    def _overlap(self, work: RolloutForecast, times: TrainingTimes, publishing: float) -> OverlapTimes:
        """Return the parts of an iteration whose critics train beside the next decoding."""
        policy = times.of_model(str(self.workload.trained[0]))
        apart = work.scoring_seconds / len(work.finished)
        return OverlapTimes(
            times.total, policy, times.total - policy, publishing, tuple(work.finished.tolist()), apart,
            latency=max(0.0, work.seconds - max(float(work.finished[-1]), work.scoring_seconds)),
            late_share=self.late_share,
        )  # fmt: skip

    def _publish(self, placement: Placement, rollout: RolloutHalf, training: TrainingHalf) -> CostFigure:
        workload, parallelism = self.workload, training.settings.parallelism
        use, width = device_use(workload.spec, rollout.engine_tensor), workload.value_bytes
        late = {str(role) for role in workload.trained[1:]}
        scored = sum(model.size.parameters for model in workload.scorers if model.role in late) * width
        own = workload.policy.size.parameters * width + (0 if rollout.inference_workers else scored)
        readers = [Readers(rollout.generation_workers, use.generation, own)]
        readers.append(Readers(rollout.inference_workers, max(1, use.inference), scored))
        devices = rollout.generation_workers * use.generation + rollout.inference_workers * use.inference
        devices += parallelism.ranks * use.training if placement == "Dedicated" else 0
        return publish_seconds(readers, parallelism.keepers, devices, self.costs)

    def moves(self, training: TrainingHalf) -> CostFigure:
        """Return the seconds of moves between device and host memory where the ranks are colocated."""
        workload, parallelism = self.workload, training.settings.parallelism
        parameters = sum(workload.model(role).size.parameters for role in workload.trained) / parallelism.keepers
        return switch_seconds(
            parameters, workload.policy.size.parameters * workload.value_bytes, self.costs,
            moments_in_host=parallelism.offload_optimizer, on_gpus=workload.on_gpus,
        )  # fmt: skip
