"""Which part of a batch is trained on while the next iteration decodes.

With `spec.rollout.overlapTraining` an iteration is closed when its batch is complete, the batch before is trained on
and those weights are published. The next one then decodes and scores by them, one version behind, while the ranks
train; it gets the new weights when it is complete. With `spec.training.criticOverlap` only the critics train beside
the next iteration (`critic_overlap`); in mode Auto each iteration chooses when it begins
(`training.critic_overlap_choice`). An iteration after which a checkpoint or an evaluation is due, or none follows,
trains all at once before it is closed. So does a replay: a group that restarts in between comes back whole.
Rule: pure. The answers depend on the job, the iteration and its first record, so all ranks get the same one and results
do not depend on who was faster or died. Must never let weights change within an iteration.
"""

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.state.job_state import JobContext, JobState


def overlaps_training(context: JobContext, iteration: int) -> bool:
    """Return whether an iteration is closed before its batch is trained on."""
    return context.spec.rollout.overlap_training == "Enabled" and not context.ends_whole(iteration)


def train_part(context: JobContext, state: JobState, iteration: int) -> pb.TrainPart.ValueType:
    """Return which models the ranks train now of an iteration's batch."""
    mode = context.spec.training.critic_overlap
    wanted = mode == "Enabled" or (mode == "Auto" and state.critic_overlap.apart)
    apart = wanted and iteration == state.iteration and not state.trained and gains(context, iteration)
    return pb.TRAIN_PART_POLICY if apart else pb.TRAIN_PART_ALL


def may_choose(context: JobContext) -> bool:
    """Return whether each iteration of the job chooses if its critics are trained apart."""
    return context.spec.training.critic_overlap == "Auto"


def gains(context: JobContext, iteration: int) -> bool:
    """Return whether anything follows an iteration that need not wait for its critics."""
    return context.spec.algorithm.fields.trains_policy(iteration) and not context.ends_whole(iteration)
