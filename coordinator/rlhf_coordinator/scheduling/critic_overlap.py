"""Critics that are trained beside the next iteration's decoding (`spec.training.criticOverlap`).

The ranks train the policy's mini-batches of a batch, and that counts as trained: it is published, the iteration is
closed, the next one decodes. Then they train the critics on the same mini-batches, and the iteration's report is
completed. Critics are loaded from ranks, and a checkpoint is made, only when their version is whole; so what critics
score waits for them. An iteration after which a checkpoint or an evaluation is due, or none follows, trains all at
once, and so does a replay: a group that restarts in between comes back whole, with the same weights. In mode Auto an
iteration says when it begins whether it trains them apart (`training.critic_overlap_choice`).
Rule: pure. Which part is trained depends on the job, the iteration and its first record alone, so that all ranks are
told the same. No critic is trained while workers read the policy from ranks, and none is read while they are trained.
"""

from typing import TYPE_CHECKING

from rlhf_api import control_pb2 as pb
from rlhf_coordinator.scheduling.decisions import Decision, ReportCritics, Train
from rlhf_coordinator.state.job_state import JobContext, JobState

if TYPE_CHECKING:
    from rlhf_coordinator.scheduling.facts import Facts


def part(context: JobContext, state: JobState, iteration: int) -> pb.TrainPart.ValueType:
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


def decide(context: JobContext, state: JobState, facts: "Facts") -> list[Decision]:
    """Return what trains the critics that are behind, or completes the report of their iteration."""
    group = facts.group
    if not group.formed:
        return []
    if group.critics_behind:
        return _train_critics(state, facts) if _begins(context, state, facts) else []
    report = state.open_report
    return [ReportCritics()] if report is not None and group.version == report.iteration + 1 else []


def _train_critics(state: JobState, facts: "Facts") -> list[Decision]:
    """Every rank whose policy's version is written down as trained: it goes on with the batch before that version."""
    return [
        Train(rank.name, state.version - 1, pb.TRAIN_PART_CRITICS)
        for rank in facts.group.ranks
        if rank.idle and rank.critics_behind and rank.trained_version == state.version
    ]


def _begins(context: JobContext, state: JobState, facts: "Facts") -> bool:
    """Whether critics may be trained: the policy was published, or nobody waits for it."""
    if facts.group.is_read:
        return False
    whole = state.stop is not None or context.last(state.iteration) or facts.checkpoint_due
    return not state.trained or (facts.published and whole)
