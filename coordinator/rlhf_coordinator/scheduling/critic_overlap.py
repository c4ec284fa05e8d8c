"""Training of critics beside the next iteration's decoding (`spec.training.criticOverlap`). Rule: pure.

The ranks first train the policy on a batch, and the iteration then counts as trained. They train the critics on the
same batch later, when no worker may read weights from ranks.
"""

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.scheduling.decisions import Decision, ReportCritics, Train
from rlhf_coordinator.scheduling.derived_state import DerivedState
from rlhf_coordinator.state.job_state import JobContext, JobState


def decide(context: JobContext, state: JobState, facts: DerivedState) -> list[Decision]:
    """Return the commands that train pending critics, or the completion of the previous iteration's open report."""
    group = facts.group
    if not group.formed:
        return []
    if group.critic_update_pending:
        return _train_critics(state, facts) if _begins(context, state, facts) else []
    report = state.open_report
    return [ReportCritics()] if report is not None and group.version == report.iteration + 1 else []


def _train_critics(state: JobState, facts: DerivedState) -> list[Decision]:
    """Return commands for every idle rank with pending critics whose policy has the job's version."""
    return [
        Train(rank.name, state.version - 1, pb.TRAIN_PART_CRITICS)
        for rank in facts.group.ranks
        if rank.idle and rank.critic_update_pending and rank.trained_version == state.version
    ]


def _begins(context: JobContext, state: JobState, facts: DerivedState) -> bool:
    """Return whether critics may be trained now: no weights are read, and their iteration is closed.

    An iteration that must end completely need only be published.
    """
    if facts.group.is_read:
        return False
    whole = state.stop is not None or context.last(state.iteration) or facts.checkpoint_due
    return not state.trained or (facts.published and whole)
