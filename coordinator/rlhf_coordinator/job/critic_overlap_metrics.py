"""The choice of an iteration about its critics, where the job chooses (spec.training.criticOverlap Auto).

Rule: read only.
"""

from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling import training_overlap


def critic_overlap_metrics(run: JobRun) -> dict[str, float]:
    """Return whether the iteration chose to train its critics separately, and the predicted gain in seconds, if any.

    The result is empty where the mode is not Auto.
    """
    state = run.state.critic_overlap
    if not training_overlap.may_choose(run.context):
        return {}
    metrics, choice = {"critic_overlap/on": float(state.apart)}, state.choice
    if choice is not None and choice.unchanged:
        metrics["critic_overlap/predicted_gain_seconds"] = choice.unchanged - choice.overlapped
    return metrics
