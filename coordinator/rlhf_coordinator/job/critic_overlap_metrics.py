"""The choice of an iteration about its critics, where the job chooses (spec.training.criticOverlap Auto).

Rule: read only. A gain that was not predicted is absent.
"""

from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling import training_overlap


def critic_overlap_metrics(run: JobRun) -> dict[str, float]:
    """Return whether the iteration trains its critics beside the next decoding, and the predicted gain in seconds.

    The result is empty where nothing is chosen.
    """
    state = run.state.critic_overlap
    if not training_overlap.may_choose(run.context):
        return {}
    metrics, choice = {"critic_overlap/on": float(state.apart)}, state.choice
    if choice is not None and choice.unchanged:
        metrics["critic_overlap/predicted_gain_seconds"] = choice.unchanged - choice.overlapped
    return metrics
