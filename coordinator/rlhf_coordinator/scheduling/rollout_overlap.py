"""Which iterations are trained on while the next one decodes (`spec.rollout.overlapTraining`).

Such an iteration is closed when its batch is complete, the batch before is trained on and those weights are published.
The next one then decodes and scores by them, one version behind, while the ranks train; they get the new weights when
it is complete. No weights change within an iteration. One after which a checkpoint or an evaluation is due, or none
follows, is trained on before it is closed, so the next one begins as that of a job that resumes there.
Rule: pure. It depends on the job and the iteration alone, so that results do, too, whoever was faster or died.
"""

from rlhf_coordinator.state.job_state import JobContext


def trains_beside_next(context: JobContext, iteration: int) -> bool:
    """Return whether an iteration is closed before its batch is trained on."""
    return context.spec.rollout.overlap_training == "Enabled" and not context.ends_whole(iteration)
