"""The plan of a run beside the best one for as many devices, for `rlhf explain`.

Rule: the run folder is untrusted; a run whose plan cannot be compared says why.
"""

from dataclasses import dataclass
from pathlib import Path

from rlhf_api.protocol import read_job
from rlhf_cli.plan_search import job_search
from rlhf_common.json_document import parse_json
from rlhf_coordinator.learned_figures import learned_figures, read_workload
from rlhf_planner.plan_search.cost_figures import FigureSource, device_figures, weakest
from rlhf_planner.plan_search.search import EXHAUSTIVE
from rlhf_planner.plan_search.seeded_search import find_plans
from rlhf_planner.plan_search.workload import UnplannableError

WORTH = 1.05
"""Predicted gain from which another plan is named."""


@dataclass(frozen=True)
class PlanComparison:
    """Predicted seconds per iteration of a run's plan and of the best one."""

    devices: int
    """Devices of the run."""
    own_seconds: float
    best_seconds: float
    best: str
    """The best plan in words."""
    source: FigureSource
    """Source of the weaker prediction."""

    @property
    def gain(self) -> float:
        """Seconds of the run's plan over those of the best."""
        return self.own_seconds / self.best_seconds

    @property
    def words(self) -> str:
        """The comparison in a sentence."""
        if self.gain < WORTH:
            return f"no plan of up to {self.devices} devices is predicted to be {WORTH - 1:.0%} faster than this one"
        return (
            f"{self.best} is predicted to be {self.gain:.2f}x as fast as this plan on up to {self.devices} devices "
            f"({self.best_seconds:.3g} s instead of {self.own_seconds:.3g} s, {self.source} figures): "
            f"`rlhf plan JOB --devices {self.devices} --write PLAN` writes it"
        )


def compare_plan(run_dir: Path) -> PlanComparison | str:
    """Return the comparison of a run's plan, or why there is none."""
    try:
        document = parse_json((run_dir / "job.json").read_bytes())
        run_job = read_job(document)
        # Chosen sizes are fixed in job.json: they are compared with all others.
        job = run_job.model_copy(update={"spec": run_job.spec.model_copy(update={"devices": None})})
        if not job.spec.generation.gpus_per_replica:
            return "processes without GPUs share cores, and a plan counts each as a device of its own"
        workload, _ = read_workload(job, run_dir)
        costs, _ = learned_figures(job, device_figures(job.spec), run_dir, workload)
        search = job_search(job, document, costs, workload, None)
        own = search.own
        if own.devices > EXHAUSTIVE:
            return f"the plan uses {own.devices} devices: `rlhf plan JOB --devices {own.devices}` searches as many"
        plans = find_plans(search, own.devices, job.spec.seed)
    except UnplannableError as error:
        return str(error)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"job.json cannot be read ({error})"
    if not plans:
        return f"no plan of up to {own.devices} devices is valid for this job"
    best = plans[0]
    words = f"{best.plan.groups} with {best.plan.training}"
    return PlanComparison(own.devices, own.seconds, best.seconds, words, weakest((own.source, best.source)))
