"""Compares the chosen plan with all plans, measured in a simulation: `python -m benchmarks.plan_regret`.

This is a discrete-event simulation of a job's structure, not a run of processes: decode steps of each worker, a queue
of scores, the forward and backward passes of 1F1B stages with jitter, sums, and publishing. Its devices follow
`HiddenPace`, whose functions differ in form from the cost model: power laws, congestion by group size, and sums that
partly hide behind the backward pass. The search sees only what a job can profile: one layer at four token counts for
two tensor sizes, a worker's decode and scoring times, an optimizer step, two links and the host. Response lengths of a
measurement are drawn with other seeds than those of the search.

Every plan of exactly N devices, in every layout and micro-batch that the search considers, is measured three times; the
mean counts. Regret is the measured time of the chosen plan over the least measured time, minus 1. Kendall's tau
compares predicted with measured times. Beside it: all colocated, half and half, the fastest option of each call, and
the first layout of the search, for half of the devices.
Rule: tails stay where they are (interStage Disabled), since the simulation moves no samples.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from benchmarks.simulated_job import HiddenPace, SimulatedJob, measured_costs

from rlhf_api.job import RLHFJob
from rlhf_planner.device_memory import ModelSize
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.plan_search.cost_figures import PlanCosts
from rlhf_planner.plan_search.device_plan import CriticOverlap, Placement
from rlhf_planner.plan_search.iteration_forecast import RolloutHalf, TrainingHalf
from rlhf_planner.plan_search.rollout_choices import RolloutWorkers
from rlhf_planner.plan_search.search import PlanSearch, counts_up_to
from rlhf_planner.plan_search.seeded_search import find_plans
from rlhf_planner.plan_search.training_seconds import TrainingSettings
from rlhf_planner.plan_search.workload import Workload
from rlhf_planner.transformer_shape import TransformerShape

REPEATS: Final = 3
SHAPE: Final = TransformerShape("llama", 256, 8, 8, 8, 32, 512, 1024, False)
SMALL: Final = replace(SHAPE, hidden=128, layers=4, heads=4, key_value_heads=4, intermediate=256)
LIMIT: Final = 256
"""Most tokens of a response."""


@dataclass(frozen=True)
class RegretCase:
    """One workload and the links of its devices."""

    name: str
    algorithm: str
    long_tailed: bool
    small_critic: bool
    fast_links: bool

    @property
    def pace(self) -> HiddenPace:
        """Devices of this workload."""
        return HiddenPace(link_bytes=4e8 if self.fast_links else 4e7)


CASES: Final = (
    RegretCase("ppo, short, small critic, fast links", "ppo", False, True, True),
    RegretCase("ppo, short, large critic, slow links", "ppo", False, False, False),
    RegretCase("ppo, long tail, small critic, slow links", "ppo", True, True, False),
    RegretCase("ppo, long tail, large critic, fast links", "ppo", True, False, True),
    RegretCase("grpo, short, fast links", "grpo", False, False, True),
    RegretCase("grpo, short, slow links", "grpo", False, False, False),
    RegretCase("grpo, long tail, fast links", "grpo", True, False, True),
    RegretCase("grpo, long tail, slow links", "grpo", True, False, False),
)


@dataclass(frozen=True)
class MeasuredPlan:
    """One plan with its predicted and its measured seconds."""

    placement: Placement
    rollout: RolloutHalf
    training: TrainingHalf
    overlap: CriticOverlap
    predicted: float
    measured: float


def size_of(shape: TransformerShape) -> ModelSize:
    """Return the size of a model of this shape."""
    parameters = shape.layers * shape.layer_parameters(False) + 2 * shape.vocabulary * shape.hidden
    values = 2 * shape.layers * shape.key_value_heads * shape.head_width
    return ModelSize(parameters, values, layers=shape.layers, key_value_heads=shape.key_value_heads)


def workload_of(case: RegretCase) -> Workload:
    """Return the workload of a case: 64 samples, on GPUs, trained with Megatron's layers."""
    own = {"ppo": {"miniBatchSize": 32}} if case.algorithm == "ppo" else {"grpo": {"miniBatchSize": 32, "groupSize": 4}}
    spec = {
        "algorithm": own,
        "models": {"actor": {"path": "policy"}, "reward": {"function": {"file": "reward.py"}}},
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"batchSize": 64, "maxPromptTokens": 32, "maxResponseTokens": LIMIT},
        "generation": {"replicas": 1, "maxBatchSize": 32, "gpusPerReplica": 1},
        "inference": {"replicas": 1, "gpusPerReplica": 1},
        "training": {"microBatchSize": 4, "gpusPerReplica": 1, "backend": "megatron"},
        "fusion": {"interStage": {"mode": "Disabled"}},
    }
    document = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "regret"}, "spec": spec}
    shapes = {"actor": SHAPE, "reference": SHAPE, "critic": SMALL if case.small_critic else SHAPE}
    lengths = LengthModel.prior(LIMIT)
    if not case.long_tailed:
        drawn = np.random.default_rng(1).integers(40, 72, 256)
        lengths = lengths.with_batch((32, int(length)) for length in drawn)
    sizes: dict[str, ModelSize | None] = {role: size_of(shape) for role, shape in shapes.items()}
    return Workload(RLHFJob.model_validate(document).spec, sizes, shapes, lengths, (32,) * 64)


class Trial:
    """All plans of one case for N devices; each half is measured once."""

    def __init__(self, case: RegretCase, devices: int) -> None:
        self.case, self.devices, self.workload = case, devices, workload_of(case)
        self.costs: PlanCosts = measured_costs(case.pace, self.workload)
        self.search = PlanSearch(self.workload, self.costs, None)
        self.job = SimulatedJob(case.pace, self.workload)

    def measured(
        self, placement: Placement, rollout: RolloutHalf, training: TrainingHalf, overlap: CriticOverlap
    ) -> float:
        """Return the mean measured seconds of a plan."""
        found = [
            self.job.seconds(placement, rollout, training.settings, overlap, seed + 1000) for seed in range(REPEATS)
        ]
        return float(np.mean(found))

    def plan(
        self, placement: Placement, rollout: RolloutHalf, training: TrainingHalf, overlap: CriticOverlap = "Disabled"
    ) -> MeasuredPlan:
        """Return a plan, predicted and measured."""
        predicted = self.search.combination.seconds(placement, rollout, training, overlap)[0]
        measured = self.measured(placement, rollout, training, overlap)
        return MeasuredPlan(placement, rollout, training, overlap, predicted, measured)

    def all_plans(self) -> list[MeasuredPlan]:
        """Return every plan that uses exactly N devices."""
        return [
            self.plan(placement, self.search.rollouts.half(workers), training, overlap)
            for placement in self.search.placements
            for workers in self.search.workers(placement, self.devices)
            for ranks in self._ranks(placement, workers)
            for training in self.search.trainings.fitting(placement, ranks)
            for overlap in self.search.overlaps(placement)
        ]

    def _ranks(self, placement: Placement, workers: RolloutWorkers) -> list[int]:
        left = self.devices - self.search.rollouts.devices(workers)
        if placement == "Dedicated":
            return [left] if left else []
        return counts_up_to(workers.generation_workers) if left == 0 else []

    def chosen(self) -> MeasuredPlan:
        """Return the plan that the search chooses."""
        plan = find_plans(self.search, self.devices)[0].plan
        candidate = self.search.exhaustive(self.devices)[0]
        training = self.search.trainings.best(candidate.placement, candidate.ranks)
        assert training is not None
        assert training.settings == TrainingSettings(plan.parallelism, plan.micro_batch_size)
        return self.plan(
            candidate.placement, self.search.rollouts.half(candidate.workers), training, candidate.critic_overlap
        )


def rules_of_thumb(plans: Sequence[MeasuredPlan], devices: int) -> dict[str, MeasuredPlan]:
    """Return the plan of each rule of thumb among all plans."""

    def first(
        placement: Placement, workers: tuple[int, int, int], ranks: int, *, fastest: bool = False
    ) -> MeasuredPlan:
        found = [
            plan
            for plan in plans
            if (plan.placement, plan.overlap) == (placement, "Disabled")
            and (plan.rollout.generation_workers, plan.rollout.inference_workers, plan.rollout.engine_tensor) == workers
            and plan.training.settings.parallelism.ranks == ranks
            and (fastest or plan.training.settings.micro_batch_size == 4)
        ]
        return min(found, key=lambda plan: plan.training.times.total) if fastest else found[0]

    half = devices // 2
    return {
        "all colocated": first("Colocated", (devices, 0, 1), devices),
        "half and half": first("Dedicated", (half, 0, 1), devices - half),
        "fastest option of each call": first("Colocated", (devices, 0, 1), devices, fastest=True),
        "first layout today": first("Dedicated", (devices - half - 1, 1, 1), half),
    }


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation of two series: pairs in the same order minus pairs in opposite order, over all."""
    a, b = np.asarray(first), np.asarray(second)
    agreement = np.sign(a[:, None] - a[None, :]) * np.sign(b[:, None] - b[None, :])
    pairs = len(a) * (len(a) - 1)
    return float(agreement.sum() / pairs) if pairs else 1.0


def result_of(case: RegretCase, devices: int) -> dict[str, Any]:
    """Return the regrets of one case."""
    trial = Trial(case, devices)
    plans = trial.all_plans()
    chosen = trial.chosen()
    best = min([*plans, chosen], key=lambda plan: plan.measured)
    regrets = {name: plan.measured / best.measured - 1 for name, plan in rules_of_thumb(plans, devices).items()}
    return {
        "case": case.name,
        "devices": devices,
        "plans": len(plans),
        "regret": chosen.measured / best.measured - 1,
        "tau": kendall_tau([plan.predicted for plan in plans], [plan.measured for plan in plans]),
        "predicted": chosen.predicted,
        "measured": chosen.measured,
        "best": _words(best),
        "chosen": _words(chosen),
        "rules": regrets,
    }


def _words(plan: MeasuredPlan) -> str:
    rollout, settings = plan.rollout, plan.training.settings
    layout = settings.parallelism.model_dump_json(exclude_defaults=True, exclude_none=True)
    return (
        f"{plan.placement} {rollout.generation_workers}x{rollout.engine_tensor}+{rollout.inference_workers} {layout} "
        f"micro {settings.micro_batch_size} overlap {plan.overlap}"
    )


def main() -> None:
    """Print one line per case and number of devices."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 6, 8])
    parser.add_argument("--cases", type=int, default=len(CASES), help="how many of the workloads are measured")
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    options = parser.parse_args()
    results = []
    for devices in options.devices:
        for case in CASES[: options.cases]:
            result = result_of(case, devices)
            results.append(result)
            rules = ", ".join(f"{name} {regret:.1%}" for name, regret in result["rules"].items())
            print(
                f"{devices} devices, {case.name}: regret {result['regret']:.1%}, tau {result['tau']:.2f} of "
                f"{result['plans']} plans; {rules}", flush=True,
            )  # fmt: skip
    worst = max(result["regret"] for result in results)
    print(f"worst regret {worst:.1%}, least tau {min(result['tau'] for result in results):.2f}")
    if options.json:
        print(json.dumps({"results": results, "worstRegret": worst}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
