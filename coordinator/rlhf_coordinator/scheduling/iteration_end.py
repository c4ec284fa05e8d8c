"""The end of an iteration and of a job: what is committed, checkpointed and closed, and which ranks may leave earlier.

Rule: pure.
"""

from typing import Final

from rlhf_api.algorithms.refill import UsedUp
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_coordinator.scheduling import evaluation
from rlhf_coordinator.scheduling.decisions import (
    CloseIteration,
    CommitTrained,
    Decision,
    ExitWorker,
    Finish,
    SaveCheckpoint,
)
from rlhf_coordinator.scheduling.derived_state import DerivedState
from rlhf_coordinator.state.job_state import JobContext, JobState

TOGETHER_SECONDS: Final = 10.0
"""Least seconds from the first report of a draining rank to the exit of ranks."""


def failure(context: JobContext, state: JobState, now: float) -> pb.Failure | None:
    """Return the failure that ends the job before any other decision: an error, a batch that is not full, or its
    deadline."""
    if state.failure is not None:
        return state.failure
    if (short := _not_full(context, state)) is not None:
        return short
    if state.deadline is None or now <= state.deadline:
        return None
    seconds = context.spec.run_policy.active_deadline_seconds
    return pb.Failure(
        reason="DeadlineExceeded",
        field="spec.runPolicy.activeDeadlineSeconds",
        message=f"the job ran for more than its {seconds} s",
        exit_code=ExitCode.FAILED,
    )


def _not_full(context: JobContext, state: JobState) -> pb.Failure | None:
    """Return the failure of a job that could not fill its batch and must not train on a smaller one."""
    refill = state.ledger.refill
    if refill.rule.used_up is not UsedUp.FAIL or state.trained or not state.ledger.all_scored or not refill.missing:
        return None
    return pb.Failure(
        reason="BatchNotFull",
        field=f"spec.algorithm.{context.spec.algorithm.name}.refillRounds",
        message=(
            f"after {_rounds(refill.rounds)} {len(refill.dropped)} of {refill.groups} prompt groups of iteration "
            f"{state.iteration} have rewards that are all equal, and the batch lacks {refill.missing}: allow more "
            "rounds, take prompts that the policy sometimes solves, or let whenRoundsUsedUp be Mask"
        ),
        exit_code=ExitCode.BAD_DATA,
    )


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def at_start(context: JobContext, iteration: int) -> Finish | None:
    """Return the end of a job whose coordinator starts after the last iteration; None if iterations remain."""
    return Finish("Complete") if iteration >= context.spec.iterations else None


def decide(context: JobContext, state: JobState, now: float, facts: DerivedState) -> list[Decision]:
    """Return what commits, saves or ends the iteration or the job, or lets ranks leave; empty if nothing is due."""
    return _close(context, state, now, facts) or _drain(context, state, now, facts)


def _close(context: JobContext, state: JobState, now: float, facts: DerivedState) -> list[Decision]:
    if state.trained:
        return _after_training(context, state, now, facts)
    if state.overlaps_training and state.stop is None:
        return _hand_on(context, state, facts)
    if facts.group.policy_version == state.iteration + 1 and state.ledger.all_scored:
        return [CommitTrained()]
    return _stop(state, now, facts) if state.stop is not None else []


def _hand_on(context: JobContext, state: JobState, facts: DerivedState) -> list[Decision]:
    """Return the closing of an iteration with a complete batch, once the previous one is trained, reported and
    published, and no evaluation keeps it open."""
    whole = facts.group.version == state.iteration and state.open_report is None
    ends = state.batch_handed_on and whole and facts.published and not evaluation.keeps_open(context, state)
    return [_closing(state)] if ends else []


def _after_training(context: JobContext, state: JobState, now: float, facts: DerivedState) -> list[Decision]:
    if not facts.published or state.checkpoint.stage != "idle":
        return []
    if facts.checkpoint_due:
        return _save(state, now, facts)
    if facts.group.is_read and state.stop is not None:
        return []
    if evaluation.keeps_open(context, state):
        return []
    if context.last(state.iteration):
        if facts.group.critic_update_pending:
            return []
        return [_closing(state, last=True), Finish("Complete")]
    return [_closing(state)]


def _closing(state: JobState, *, last: bool = False) -> CloseIteration:
    """Return the closing decision: what the report still awaits, or that training metrics must be read again."""
    if state.overlaps_training:
        return CloseIteration(last, awaits="training", late_critics=state.critic_update_pending and last)
    if not state.critic_update_pending:
        return CloseIteration(last)
    return CloseIteration(last, late_critics=True) if last else CloseIteration(awaits="critics")


def _stop(state: JobState, now: float, facts: DerivedState) -> list[Decision]:
    behind = facts.group.formed and facts.group.critic_update_pending
    if facts.group.train_under_way or behind or state.checkpoint.stage != "idle":
        return []
    if facts.checkpoint_due and facts.group.version == state.version:
        return _save(state, now, facts)
    return [Finish("Stopped")]


def _drain(context: JobContext, state: JobState, now: float, facts: DerivedState) -> list[Decision]:
    """Return the exits of draining ranks, or first a missing checkpoint of the job's version that they can save."""
    group = facts.group
    since = min((rank.draining_since for rank in group.draining), default=now)
    if not group.draining or state.stop is not None or now - since < TOGETHER_SECONDS:
        return []
    busy = group.train_under_way or group.critic_update_pending or any(rank.rank_command for rank in group.ranks)
    if busy or group.is_read or state.checkpoint.stage != "idle":
        return []
    whole = group.version == state.version and state.may_be_saved
    if whole and context.spec.checkpoints is not None and state.checkpoint.newest < state.version:
        return _save(state, now, facts)
    return [ExitWorker(rank.name, ExitCode.OK, "it was asked to end, and is not needed now") for rank in group.draining]


def _save(state: JobState, now: float, facts: DerivedState) -> list[Decision]:
    ready = facts.group.version == state.version and now >= state.checkpoint.not_before
    return [SaveCheckpoint(state.version)] if ready else []
