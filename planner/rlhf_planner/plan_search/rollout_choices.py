"""Generation and scoring workers that a number of devices allows, with their forecasts and lower bounds.

Rule: pure; a choice is judged independently of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlhf_api.algorithms import graph_of
from rlhf_api.device_sizes import device_use
from rlhf_common.names import Group
from rlhf_planner.device_memory import scoring
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.plan_search.cost_figures import FigureSource, PlanCosts, weakest
from rlhf_planner.plan_search.device_plan import DevicePlan, Placement
from rlhf_planner.plan_search.engine_costs import engine_costs
from rlhf_planner.plan_search.iteration_forecast import RolloutHalf
from rlhf_planner.plan_search.phase_memory import generation_memory
from rlhf_planner.plan_search.rollout_forecast import lower_bound, rollout_forecast
from rlhf_planner.plan_search.workload import Workload

TENSOR_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, order=True)
class RolloutWorkers:
    """Workers of a rollout."""

    generation_workers: int
    inference_workers: int
    engine_tensor: int
    max_batch_size: int


class RolloutChoices:
    """Forecasts of rollouts, each computed once."""

    def __init__(self, workload: Workload, costs: PlanCosts, device_bytes: int | None) -> None:
        self._workload, self._costs, self._device_bytes = workload, costs, device_bytes
        self._engines: dict[tuple[int, int, int], tuple[StageCosts, FigureSource]] = {}
        self._halves: dict[RolloutWorkers, RolloutHalf] = {}
        self._bounds: dict[RolloutWorkers, float] = {}
        self._fits: dict[tuple[Placement, int, int, int, bool], bool] = {}
        self.tensor_sizes = _tensor_sizes(workload)

    def generation_counts(self, counts: Sequence[int]) -> Sequence[int]:
        """Return the numbers of generation workers that are tried."""
        return [self._workload.spec.generation.replicas] if "Generation" in self._workload.fixed else counts

    def devices(self, workers: RolloutWorkers) -> int:
        """Return the devices of these workers."""
        use = device_use(self._workload.spec, workers.engine_tensor)
        return workers.generation_workers * use.generation + workers.inference_workers * use.inference

    def inference_counts(self, counts: Sequence[int]) -> list[int]:
        """Return the numbers of inference workers that are tried."""
        spec = self._workload.spec
        if "Inference" in self._workload.fixed:
            return [spec.inference.replicas]
        if not graph_of(spec).tasks_of(Group.INFERENCE):
            return [0]
        if device_use(spec, 1).inference == 0:
            return [spec.inference.replicas]
        if self._device_bytes is not None and scoring(spec, self._workload.sizes).total > self._device_bytes:
            return [0]
        return [0, *counts]

    def batch_sizes(self, placement: Placement, generation: int, inference: int, tensor: int) -> Iterator[int]:
        """Yield the job's own batch size if it fits, and the largest power of two that fits and may be filled.

        The power is tried if the memory is known and the job does not fix the size.
        """
        own = self._workload.spec.generation.max_batch_size
        fits = self._worker_fits(placement, generation, inference, tensor, own)
        if fits:
            yield own
        if self._device_bytes is None or "Generation" in self._workload.fixed:
            return
        batch = 1 << (-(-self._workload.samples // generation) - 1).bit_length()
        while batch > (own if fits else 0):
            if self._worker_fits(placement, generation, inference, tensor, batch):
                yield batch
                return
            batch //= 2

    def half(self, workers: RolloutWorkers) -> RolloutHalf:
        """Return the forecast of these workers."""
        if workers not in self._halves:
            stage, source = self._engine(workers)
            forecast = rollout_forecast(self._workload, stage, workers.generation_workers, workers.inference_workers)
            self._halves[workers] = RolloutHalf(
                workers.generation_workers, workers.inference_workers, workers.engine_tensor, workers.max_batch_size,
                forecast, weakest((source, self._workload.length_source)),
            )  # fmt: skip
        return self._halves[workers]

    def bound(self, workers: RolloutWorkers) -> float:
        """Return a lower bound on the forecast of these workers, in seconds."""
        if workers not in self._bounds:
            stage, _ = self._engine(workers)
            counts = (workers.generation_workers, workers.inference_workers)
            self._bounds[workers] = lower_bound(self._workload, stage, *counts)
        return self._bounds[workers]

    def _engine(self, workers: RolloutWorkers) -> tuple[StageCosts, FigureSource]:
        use = device_use(self._workload.spec, workers.engine_tensor)
        scoring_devices = max(1, use.inference) if workers.inference_workers else use.generation
        key = (workers.engine_tensor, workers.max_batch_size, scoring_devices)
        if key not in self._engines:
            self._engines[key] = engine_costs(self._workload, self._costs, *key)
        return self._engines[key]

    def _worker_fits(self, placement: Placement, generation: int, inference: int, tensor: int, batch: int) -> bool:
        if self._device_bytes is None:
            return True
        key = (placement, min(2, generation), tensor, batch, bool(inference))
        if key not in self._fits:
            plan = replace(
                DevicePlan.from_spec(self._workload.spec), placement=placement, generation_workers=min(2, generation),
                engine_tensor=tensor, max_batch_size=batch, inference_workers=min(1, inference),
            )  # fmt: skip
            self._fits[key] = generation_memory(self._workload, plan).total <= self._device_bytes
        return self._fits[key]


def _tensor_sizes(workload: Workload) -> tuple[int, ...]:
    """Return the tensor sizes of an engine that may split the policy; otherwise the job's own."""
    generation, model = workload.spec.generation, workload.policy
    own = generation.parallelism.tensor
    splits = generation.engine == "vllm" or (generation.engine == "Auto" and generation.gpus_per_replica > 0)
    heads, shape = model.size.key_value_heads, model.shape
    if "Generation" in workload.fixed or not splits or shape is None or not heads:
        return (own,)
    allowed = [
        size for size in TENSOR_SIZES if shape.heads % size == 0 and max(heads, size) % min(heads, size) == 0
    ]  # fmt: skip
    return tuple(sorted({own, *allowed}))
