"""Figures for `rlhf plan --devices` that the job's newest run has shown.

Rule: a run folder is untrusted. An unreadable file teaches nothing and raises nothing.
"""

import json
from dataclasses import replace
from pathlib import Path

from rlhf_api.job import RLHFJob
from rlhf_api.protocol import read_job
from rlhf_cli.fusion_plan import job_lengths, measured_costs, with_drafts
from rlhf_coordinator.model_sizes import read_shapes, read_sizes
from rlhf_coordinator.reports.trackers import facts_jsonl
from rlhf_planner.plan_search.cost_figures import CostFigure, EngineProfile, FigureSource, PlanCosts
from rlhf_planner.plan_search.learned_training import learned_compute, observed_seconds
from rlhf_planner.plan_search.training_choices import own_settings
from rlhf_planner.plan_search.training_seconds import training_times
from rlhf_planner.plan_search.workload import Workload


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
    compute = _compute(costs, run, ran) if ran is not None else None
    if compute is not None:
        costs = replace(costs, compute=compute)
        notes.append(f"computing in training takes {compute.value:.3g} times the roofline's time, as in {run}")
    return costs, notes


def _compute(costs: PlanCosts, run: Path, ran: Workload) -> CostFigure | None:
    """Return the factor on computing in training of a run; None if the run does not show it."""
    try:
        seconds = observed_seconds(facts_jsonl.read_facts(run / facts_jsonl.FILE))
    except OSError:
        return None
    settings = own_settings(ran.spec)

    def predict(factor: float) -> float:
        return training_times(ran, replace(costs, compute=CostFigure(factor)), settings).total

    return learned_compute(predict, seconds)
