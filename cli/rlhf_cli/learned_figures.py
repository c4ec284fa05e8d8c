"""Figures that a run of the job has shown, for `rlhf plan --devices`, `rlhf run` and `rlhf explain`.

Rule: a run folder is untrusted. An unreadable file of costs or profiles teaches nothing and raises nothing.
"""

import json
from dataclasses import replace
from pathlib import Path

from rlhf_api.job import RLHFJob
from rlhf_api.protocol import read_job
from rlhf_cli.fusion_plan import job_lengths, measured_costs, with_drafts
from rlhf_cli.local.run_folder import newest_first
from rlhf_coordinator.model_sizes import read_shapes, read_sizes
from rlhf_coordinator.reports.trackers import facts_jsonl
from rlhf_planner.plan_search.cost_document import COSTS_FILE, CostDocument, CostDocumentError
from rlhf_planner.plan_search.cost_figures import CostFigure, EngineProfile, FigureSource, PlanCosts
from rlhf_planner.plan_search.learned_training import learned_compute, learned_rest, observed_seconds
from rlhf_planner.plan_search.training_choices import own_settings
from rlhf_planner.plan_search.training_seconds import mini_batches_of, training_times
from rlhf_planner.plan_search.workload import Workload


def newest_teaching_run(job: RLHFJob, runs: Path) -> Path | None:
    """Return the newest run folder of this job with costs of generation or of training; None when there is none."""
    for folder in newest_first(runs, job.name):
        if measured_costs(folder) is not None or (folder / COSTS_FILE).is_file():
            return folder
    return None


def read_workload(job: RLHFJob, run: Path | None) -> tuple[Workload, tuple[str, ...]]:
    """Return the workload of a resolved job, and what it assumes of lengths. Raises UnplannableError.

    `run` teaches the lengths; None assumes them.
    """
    lengths, prompts, guessed = job_lengths(job, run)
    source = FigureSource.LEARNED if lengths.samples else FigureSource.ASSUMED
    sizes, shapes = read_sizes(job.spec), read_shapes(job.spec)
    return Workload(job.spec, sizes, shapes, lengths, tuple(prompts), source), guessed


def run_workload(run: Path) -> Workload | None:
    """Return the workload of the job that ran in a folder; None if the folder does not show it."""
    try:
        return read_workload(read_job(json.loads((run / "job.json").read_bytes())), run)[0]
    except (OSError, ValueError):
        return None


def learned_figures(job: RLHFJob, costs: PlanCosts, run: Path, ran: Workload | None) -> tuple[PlanCosts, list[str]]:
    """Return the costs with what a run of the job has shown, and notes that name the run.

    `ran` is the workload of the run; None if it is unknown.
    """
    notes = []
    measured = measured_costs(run)
    if measured is not None:
        stage, _ = with_drafts(job, measured, assumed=False)
        tensor = job.spec.generation.parallelism.tensor
        costs = replace(costs, engine=EngineProfile(stage, tensor, FigureSource.LEARNED))
        notes.append(f"costs of generation and scoring are those of {run}")
    profiled = _profiled(costs, run)
    if profiled is not None:
        costs = profiled
        notes.append(f"costs of training are measured, in {run / COSTS_FILE}")
    return (costs, notes) if ran is None else _with_training(costs, notes, run, ran)


def _profiled(costs: PlanCosts, run: Path) -> PlanCosts | None:
    """Return the costs with those that the ranks of a run have measured; None if they have not."""
    try:
        return CostDocument.read((run / COSTS_FILE).read_bytes()).applied(costs)
    except (OSError, CostDocumentError):
        return None


def _with_training(costs: PlanCosts, notes: list[str], run: Path, ran: Workload) -> tuple[PlanCosts, list[str]]:
    """Return the costs and notes with what the iterations of a run have shown of training."""
    try:
        profiles = facts_jsonl.read_facts(run / facts_jsonl.FILE)
    except OSError:
        return costs, notes
    settings = own_settings(ran.spec)
    if {profile.role for profile in costs.layers}.issuperset(ran.trained):
        after = training_times(ran, costs, settings).after_schedules
        rest = learned_rest(profiles, mini_batches_of(ran), after)
        if rest is None:
            return costs, notes
        seconds = f"an iteration of training has {rest.value:.3g} s outside of its mini-batches, as in {run}"
        return replace(costs, iteration_seconds=rest), [*notes, seconds]

    def predict(factor: float) -> float:
        return training_times(ran, replace(costs, compute=CostFigure(factor)), settings).total

    compute = learned_compute(predict, observed_seconds(profiles))
    if compute is None:
        return costs, notes
    factor = f"computing in training takes {compute.value:.3g} times the roofline's time, as in {run}"
    return replace(costs, compute=compute), [*notes, factor]
