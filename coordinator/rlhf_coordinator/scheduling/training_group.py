"""The training group: when ranks form one, when it is broken, what each trains on next, what version it holds.

All is derived from what ranks say of themselves, so it works the same after a rank, the group or the coordinator came
back. A group starts from the newest checkpoint (or the manifest's models) and *replays* journaled batches up to the
job's version; a new batch is the same rule: a rank at version v trains on batch v when that batch is complete.
A lost rank takes the group with it: the others sit in collectives that never end, so they restart as new processes.
Rule: pure. Must never let ranks train while a worker reads weights from them.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from rlhf_common.names import ExitCode
from rlhf_coordinator.scheduling import training_overlap
from rlhf_coordinator.scheduling.decisions import (
    CommitBatch,
    Decision,
    ExitWorker,
    Finish,
    FormGroup,
    MeasureSchedule,
    RestartGroup,
    Train,
)
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.worker import CommandKind, Worker

SUSPECT_SECONDS: Final = 4.0
"""When a rank dies the others fail too, and may say so before the dead one's session counts as lost: wait this long for
that explanation before a failure of training is taken at its word."""


@dataclass(frozen=True)
class TrainingGroup:
    """The training group, as its ranks describe themselves."""

    ranks: tuple[Worker, ...]
    """Who holds the ranks, by rank."""
    formed: bool
    """All ranks are in one group epoch and none has failed."""
    version: int | None
    """The version that every rank holds, idle; None while they train, restart, or differ, or critics are behind."""
    policy_version: int | None
    """The same of the policy alone."""
    critic_update_pending: bool
    """Some rank has yet to train the critics of an iteration whose policy is trained."""
    train_under_way: bool
    """Some rank trains on the current batch, or has."""
    has_devices: bool
    """It is training's turn on the device of every rank."""
    measures: bool
    """Its ranks measure for the choice of a schedule."""
    draining: tuple[Worker, ...]
    """Ranks whose machines asked them to end, and that stay while they may be needed."""
    is_read: bool
    """Some worker reads weights from ranks, which therefore must not train."""


def observe(state: JobState, serving: Collection[str]) -> TrainingGroup:
    """Return what is true of the training group now. `serving`: workers whose device is not training's."""
    ranks = tuple(state.fleet.ranks())
    one_epoch = len({rank.group_epoch for rank in ranks}) == 1
    formed = one_epoch and all(rank.connected and rank.trains and rank.train_failure is None for rank in ranks)
    held = {rank.trained_version if rank.rank_command is None else None for rank in ranks} if formed else set()
    policy_version = held.pop() if len(held) == 1 else None
    behind = any(rank.critic_update_pending for rank in ranks)
    return TrainingGroup(
        ranks=ranks,
        formed=formed,
        version=None if behind else policy_version,
        policy_version=policy_version,
        critic_update_pending=behind,
        train_under_way=not state.trained and any(_has_begun(rank, state.iteration) for rank in ranks),
        has_devices=not any(rank.name in serving for rank in ranks),
        measures=any(_rank_does(rank, CommandKind.MEASURE) for rank in ranks),
        draining=tuple(rank for rank in ranks if rank.connected and rank.draining_since),
        is_read=any(item.from_ranks for worker in state.fleet for item in worker.pending.values()),
    )


def _has_begun(rank: Worker, iteration: int) -> bool:
    """Whether the rank trains on the batch of an iteration, as far as is known, or has."""
    if not rank.trains:
        return False
    may_train = rank.trained_version == iteration and _rank_does(rank, CommandKind.TRAIN, CommandKind.UNKNOWN)
    return may_train or rank.trained_version == iteration + 1


def _rank_does(rank: Worker, *kinds: CommandKind) -> bool:
    return rank.rank_command is not None and rank.rank_command.kind in kinds


def decide(context: JobContext, state: JobState, now: float, group: TrainingGroup) -> list[Decision]:
    """Return the decisions that form the group, restart it, or set it to work."""
    if not group.ranks:
        return []
    members = [rank for rank in group.ranks if _is_member(rank)]
    reason = _broken(state, group, members, now)
    if reason is not None:
        return _restart(context, state, members, *reason)
    if not members and all(rank.idle and now >= rank.not_before for rank in group.ranks) and state.stop is None:
        return [FormGroup(state.group_epoch + 1)]
    return _train(context, state, group) if group.formed else []


def _is_member(rank: Worker) -> bool:
    joins = _rank_does(rank, CommandKind.BECOME, CommandKind.UNKNOWN)
    return rank.trains or joins or rank.train_failure is not None


def _broken(state: JobState, group: TrainingGroup, members: list[Worker], now: float) -> tuple[str, bool] | None:
    """Why the group cannot go on, and whether that counts as a failure; None when it can."""
    if not members:
        return None
    gone = [rank for rank in group.ranks if rank.lost or (rank.session and not _is_member(rank))]
    if gone:
        return f"{gone[0].name} was lost", False
    if len({rank.group_epoch for rank in members}) > 1:
        return "its ranks belong to different groups", False
    ahead = state.version if state.trained or not state.ledger.all_scored else state.version + 1
    for rank in members:
        if rank.trained_version > ahead:
            return f"{rank.name} holds a version the journal does not know", False
    for rank in members:
        failure = rank.train_failure
        if failure is not None and (now - rank.failed_at > SUSPECT_SECONDS or rank.asks_restart):
            return f"{rank.name}: {failure.message}", not rank.asks_restart
    return None


def _restart(context: JobContext, state: JobState, members: list[Worker], reason: str, counted: bool) -> list[Decision]:
    present = tuple(rank.name for rank in members if rank.connected)
    if not present:
        return []
    failure = next((rank.train_failure for rank in members if rank.train_failure is not None), None)
    if counted and failure is not None:
        limit = context.spec.run_policy.backoff_limit
        if not failure.retryable or state.group_failures >= limit:
            return [Finish("Failed", failure)]
    exits = [ExitWorker(name, ExitCode.RESTART, f"the training group restarts: {reason}") for name in present]
    return [RestartGroup(present, reason, counted), *exits]


def _train(context: JobContext, state: JobState, group: TrainingGroup) -> list[Decision]:
    """The next batch, once all of it is scored; with a stop or a rank that drains, only what is under way."""
    if group.is_read or any(
        item.kind is CommandKind.CHECKPOINT for rank in group.ranks for item in rank.pending.values()
    ):
        return []
    ending = state.stop is not None or bool(group.draining)
    if state.schedule.stage != "decided":
        return _measure(state, group, ending)
    if group.critic_update_pending or (ending and not group.train_under_way):
        return []
    target = state.version
    # A report that is open is completed when all ranks are done with its batch: none goes on before.
    complete = state.ledger.all_scored and not state.overlaps_training and state.open_report is None
    if not state.trained and complete and not state.evaluation.holds_training:
        target += 1
    ready = [rank for rank in group.ranks if rank.idle and rank.trained_version < target]
    decisions: list[Decision] = [
        Train(
            rank.name,
            rank.trained_version,
            training_overlap.train_part(context, state, rank.trained_version),
            keep=0 < state.ledger.version == rank.trained_version < state.iteration,
        )
        for rank in ready
    ]
    new = any(rank.trained_version == state.iteration for rank in ready)
    return [CommitBatch(), *decisions] if new and not state.trained else decisions


def _measure(state: JobState, group: TrainingGroup, ending: bool) -> list[Decision]:
    """All ranks at once, or none: a rank that measures waits for the others."""
    wanted = state.schedule.stage in ("stages", "tables") and not ending
    ready = all(rank.idle for rank in group.ranks) and group.has_devices
    return [MeasureSchedule()] if wanted and ready else []
