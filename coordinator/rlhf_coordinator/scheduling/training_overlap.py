"""Which part of a batch is trained while the next iteration decodes. Rule: pure.

A replay trains all models.
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
    """Return whether the mode of critic overlap is Auto."""
    return context.spec.training.critic_overlap == "Auto"


def gains(context: JobContext, iteration: int) -> bool:
    """Return whether an iteration trains the policy, and need not be trained completely before the next one."""
    return context.spec.algorithm.fields.trains_policy(iteration) and not context.ends_whole(iteration)
