"""Which part of a batch is trained while the next iteration decodes.

With `spec.rollout.overlapTraining` an iteration is closed when its batch is complete, and the previous batch is trained
and its weights are published. The next iteration decodes and scores with these weights, one version behind, while the
ranks train; the new weights are loaded when its batch is complete. With `spec.training.criticOverlap` only the critics
train beside the next iteration (`critic_overlap`); in mode Auto each iteration chooses when it begins
(`training.critic_overlap_choice`). An iteration that is the last, or is followed by a due checkpoint or evaluation,
trains completely before it is closed. So does a replay, which restores a restarted group completely.
Rule: pure. The answers depend on the job, the iteration and its records, so all ranks get the same one. Must never let
weights change within an iteration.
"""

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.state.job_state import JobContext, JobState


def overlaps_training(context: JobContext, iteration: int) -> bool:
    """Return whether an iteration is closed before its batch is trained."""
    return context.spec.rollout.overlap_training == "Enabled" and not context.ends_whole(iteration)


def train_part(context: JobContext, state: JobState, iteration: int) -> pb.TrainPart.ValueType:
    """Return which models the ranks now train on an iteration's batch."""
    mode = context.spec.training.critic_overlap
    wanted = mode == "Enabled" or (mode == "Auto" and state.critic_overlap.apart)
    apart = wanted and iteration == state.iteration and not state.trained and gains(context, iteration)
    return pb.TRAIN_PART_POLICY if apart else pb.TRAIN_PART_ALL


def may_choose(context: JobContext) -> bool:
    """Return whether each iteration of the job chooses if its critics are trained separately."""
    return context.spec.training.critic_overlap == "Auto"


def gains(context: JobContext, iteration: int) -> bool:
    """Return whether work follows an iteration that need not wait for its critics."""
    return context.spec.algorithm.fields.trains_policy(iteration) and not context.ends_whole(iteration)
