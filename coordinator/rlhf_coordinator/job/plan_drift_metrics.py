"""The measured seconds of an iteration that a plan for spec.devices predicts.

Rule: read only. Checkpoints, evaluations, starts and recoveries are not predicted, so they do not count.
"""

from typing import Final

from rlhf_coordinator.job.job_run import JobRun

STAGE_OF_PHASE: Final = {"Generating": "generate", "Scoring": "score", "Training": "train", "Publishing": "publish"}
"""Phase -> stage of a plan that predicts it."""
UNUSUAL: Final = ("Starting", "Recovering")
"""Phases that no plan predicts. A checkpoint of colocated ranks also has a short phase Recovering, until they are
loaded."""
UNUSUAL_SHARE: Final = 0.1
"""Seconds of these phases over predicted ones from which an iteration is not compared with a prediction."""


def measured_stages(run: JobRun) -> dict[str, float]:
    """Return the seconds by stage of the iteration that ends.

    Empty for the first iteration of this process, and if much of an iteration was a start or a recovery.
    """
    phases = run.times.seconds
    stages = {stage: phases.get(phase, 0.0) for phase, stage in STAGE_OF_PHASE.items()}
    unusual = sum(phases.get(phase, 0.0) for phase in UNUSUAL)
    usual = not run.state.plan_drift.first and unusual < UNUSUAL_SHARE * sum(stages.values())
    return stages if usual else {}


def plan_drift_metrics(run: JobRun) -> dict[str, float]:
    """Return measured over predicted seconds of the iteration that ends; empty without a prediction to compare."""
    predicted, measured = run.state.plan_drift.predicted, measured_stages(run)
    return {"plan/drift": sum(measured.values()) / predicted} if predicted > 0 and measured else {}
