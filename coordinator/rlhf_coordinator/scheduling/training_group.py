"""The training group: when ranks form one, when it is broken, what each trains on next, what version it holds.

All is derived from what ranks say of themselves, so it works the same after a rank, the group or the coordinator came
back. A group starts from the newest checkpoint (or the manifest's models) and *replays* journaled batches up to the
job's version; a new batch is the same rule: a rank at version v trains on batch v when that batch is complete.
A lost rank takes the group with it: the others sit in collectives that never end, so they restart as new processes.
Rule: pure. Must never let ranks train while a worker reads weights from them.
"""

from typing import Final

from rlhf_coordinator.scheduling import turns
from rlhf_coordinator.scheduling.decisions import (
    CommitBatch,
    Decision,
    Finish,
    FormGroup,
    MeasureSchedule,
    RestartGroup,
    Train,
)
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.worker import CommandKind, PendingCommand, Worker

SUSPECT_SECONDS: Final = 4.0
"""When a rank dies the others fail too, and may say so before the dead one's session counts as lost: wait this long for
that explanation before a failure of training is taken at its word."""


def ranks(state: JobState) -> list[Worker]:
    """Who holds the ranks, by rank."""
    return state.fleet.ranks()


def formed(state: JobState) -> bool:
    """All ranks are training under one group epoch and none has failed."""
    group = ranks(state)
    same = len({rank.group_epoch for rank in group}) == 1
    return same and all(rank.connected and rank.trains and rank.train_failure is None for rank in group)


def version(state: JobState) -> int | None:
    """The version that every rank holds, idle; None while they train, restart, or differ."""
    if not formed(state):
        return None
    held = {rank.trained_version if rank.rank_command is None else None for rank in ranks(state)}
    return held.pop() if len(held) == 1 else None


def train_under_way(state: JobState) -> bool:
    """Some rank trains on the current batch, or has."""
    return not state.trained and any(
        rank.trains
        and (
            rank.trained_version == state.iteration + 1
            or (rank.trained_version == state.iteration and _may_train(rank.rank_command))
        )
        for rank in ranks(state)
    )


def _may_train(work: PendingCommand | None) -> bool:
    return work is not None and work.kind in (CommandKind.TRAIN, CommandKind.UNKNOWN)


def draining(state: JobState) -> list[Worker]:
    """Ranks whose machines asked them to end, and that stay while they may be needed."""
    return [rank for rank in ranks(state) if rank.connected and rank.draining_since]


def measuring(state: JobState) -> bool:
    """Its ranks measure for the choice of a schedule."""
    return any(rank.rank_command is not None and rank.rank_command.kind is CommandKind.MEASURE for rank in ranks(state))


def decide(context: JobContext, state: JobState, now: float) -> list[Decision]:
    """Forms, restarts, or sets the group to work."""
    group = ranks(state)
    if not group:
        return []
    members = [rank for rank in group if _is_member(rank)]
    reason = _broken(state, members, now)
    if reason is not None:
        return _restart(context, state, members, *reason)
    if not members and all(rank.idle and now >= rank.not_before for rank in group) and state.stop is None:
        return [FormGroup(state.group_epoch + 1)]
    return _train(state) if formed(state) else []


def _is_member(rank: Worker) -> bool:
    forming = rank.rank_command is not None and rank.rank_command.kind in (CommandKind.BECOME, CommandKind.UNKNOWN)
    return rank.trains or forming or rank.train_failure is not None


def _broken(state: JobState, members: list[Worker], now: float) -> tuple[str, bool] | None:
    """(why, counted as a failure) when the group cannot go on."""
    if not members:
        return None
    gone = [rank for rank in ranks(state) if rank.lost or (rank.session and not _is_member(rank))]
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
    here = tuple(rank.name for rank in members if rank.connected)
    if not here:
        return []
    failure = next((rank.train_failure for rank in members if rank.train_failure is not None), None)
    if counted and failure is not None:
        limit = context.spec.run_policy.backoff_limit
        if not failure.retryable or state.group_failures >= limit:
            return [Finish("Failed", failure)]
    return [RestartGroup(here, reason, counted)]


def _ending(state: JobState) -> bool:
    """The job stops, or a rank goes: nothing new is begun."""
    return state.stop is not None or bool(draining(state))


def _measure(state: JobState, group: list[Worker]) -> list[Decision]:
    """All ranks at once, or none: a rank that measures waits for the others."""
    wanted = state.schedule.stage in ("stages", "tables") and not _ending(state)
    ready = all(rank.idle and not turns.decodes(state, rank) for rank in group)
    return [MeasureSchedule()] if wanted and ready else []


def _train(state: JobState) -> list[Decision]:
    group = ranks(state)
    if any(item.from_ranks for worker in state.fleet for item in worker.pending.values()):
        return []
    if any(item.kind is CommandKind.CHECKPOINT for rank in group for item in rank.pending.values()):
        return []
    if state.schedule.stage != "decided":
        return _measure(state, group)
    target = state.version
    if not state.trained and state.ledger.all_scored and (not _ending(state) or train_under_way(state)):
        target += 1
    if _ending(state) and not train_under_way(state):
        return []
    ready = [rank for rank in group if rank.idle and rank.trained_version < target]
    decisions: list[Decision] = [Train(rank.name, rank.trained_version) for rank in ready]
    new = any(rank.trained_version == state.iteration for rank in ready)
    return [CommitBatch(), *decisions] if new and not state.trained else decisions


def merged_metrics(state: JobState) -> dict[str, float]:
    """Metrics of the iteration's training: all ranks report the same, but for their times. Of those, bubbles are the
    mean, mini-batches the slowest rank's, the others the first rank's."""
    told = [
        rank.last_train.metrics
        for rank in ranks(state)
        if rank.last_train is not None and rank.last_train.iteration == state.iteration
    ]
    metrics: dict[str, float] = {}
    for each in reversed(told):
        metrics.update(each)
    if "bubble_seconds" in metrics:
        metrics["bubble_seconds"] = sum(each["bubble_seconds"] for each in told) / len(told)
        metrics["step_seconds"] = max(each["step_seconds"] for each in told)
    return metrics
