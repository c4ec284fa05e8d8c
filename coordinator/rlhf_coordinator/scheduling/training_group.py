"""The training group: when ranks form one, when it is broken, what each trains on next, and the version that it has.

A group starts from the newest checkpoint (or the manifest's models) and *replays* journaled batches up to the job's
version. Rule: pure.
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
"""Seconds from a failure of training, without the exit code RESTART, until it breaks the group."""


@dataclass(frozen=True)
class TrainingGroup:
    """The training group, from the reports of its ranks."""

    ranks: tuple[Worker, ...]
    """Workers of the ranks, by rank."""
    formed: bool
    """Whether all ranks are connected and joined in one group epoch, and none has failed."""
    version: int | None
    """Version that every rank has; None while one has a command, they differ, or a critic update is pending.

    It is None without a formed group.
    """
    policy_version: int | None
    """Version of the policy that every rank has: like `version`, but also known while a critic update is pending."""
    critic_update_pending: bool
    """Whether a rank still has to train the critics of an iteration whose policy is trained."""
    train_under_way: bool
    """Whether a rank trains, or has trained, on the current batch, as far as known, before that is recorded."""
    has_devices: bool
    """Whether training has the device of every rank."""
    measures: bool
    """Whether a rank takes measurements."""
    draining: tuple[Worker, ...]
    """Connected ranks that reported that their machines asked them to end."""
    is_read: bool
    """Whether a worker may read weights from ranks."""


def observe(state: JobState, serving: Collection[str]) -> TrainingGroup:
    """Return the current state of the training group. `serving`: workers whose device is not training's."""
    ranks = tuple(state.fleet.ranks())
    one_epoch = len({rank.group_epoch for rank in ranks}) == 1
    formed = one_epoch and all(rank.connected and rank.trains and rank.train_failure is None for rank in ranks)
    versions = {rank.trained_version if rank.rank_command is None else None for rank in ranks} if formed else set()
    policy_version = versions.pop() if len(versions) == 1 else None
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
    """Return whether the rank trains or has trained on the batch of an iteration, as far as known."""
    if not rank.trains:
        return False
    may_train = rank.trained_version == iteration and _rank_does(rank, CommandKind.TRAIN, CommandKind.UNKNOWN)
    return may_train or rank.trained_version == iteration + 1


def _rank_does(rank: Worker, *kinds: CommandKind) -> bool:
    return rank.rank_command is not None and rank.rank_command.kind in kinds


def decide(context: JobContext, state: JobState, now: float, group: TrainingGroup) -> list[Decision]:
    """Return the decisions that form the group, restart it, or set it to work; a failure may end the job."""
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
    """Return why the group cannot continue, and whether that counts as a failure; None when it can."""
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
    """Return the commands that measure the schedule, or that train the next batch of each rank."""
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
    # An open report is completed when all ranks are done with its batch: none continues before.
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
    """Return the measurement by all ranks, once all are idle and training has their devices."""
    wanted = state.schedule.stage in ("stages", "tables") and not ending
    ready = all(rank.idle for rank in group.ranks) and group.has_devices
    return [MeasureSchedule()] if wanted and ready else []
