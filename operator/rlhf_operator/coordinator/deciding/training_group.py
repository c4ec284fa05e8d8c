"""The training group: when ranks form one, when it is broken, what each trains on next, what version it holds.

All is derived from what ranks say of themselves, so it works the same after a rank, the group or the coordinator came
back. A group starts from the newest checkpoint (or the manifest's models) and *replays* journaled batches up to the
job's version; a new batch is the same rule: a rank at version v trains on batch v when that batch is complete.
A lost rank takes the group with it: the others sit in collectives that never end, so they restart as new processes.
Rule: pure. Must never let ranks train while a worker reads weights from them.
"""

from typing import Final

from rlhf_operator.coordinator.deciding import turns
from rlhf_operator.coordinator.deciding.decisions import (
    CommitBatch,
    Decision,
    Finish,
    Form,
    MeasureSchedule,
    RestartGroup,
    Train,
)
from rlhf_operator.coordinator.world.worker import Pending, Work, Worker
from rlhf_operator.coordinator.world.world import Plan, World

SUSPECT_SECONDS: Final = 4.0
"""When a rank dies the others fail too, and may say so before the dead one's session counts as lost: wait this long for
that explanation before a failure of training is taken at its word."""


def ranks(world: World) -> list[Worker]:
    """Who holds the ranks, by rank."""
    return world.fleet.ranks()


def formed(world: World) -> bool:
    """All ranks are training under one group epoch and none has failed."""
    group = ranks(world)
    same = len({rank.group_epoch for rank in group}) == 1
    return same and all(rank.connected and rank.trains and rank.train_failure is None for rank in group)


def version(world: World) -> int | None:
    """The version that every rank holds, idle; None while they train, restart, or differ."""
    if not formed(world):
        return None
    held = {rank.trained_version if rank.rank_work is None else None for rank in ranks(world)}
    return held.pop() if len(held) == 1 else None


def train_under_way(world: World) -> bool:
    """Some rank trains on the current batch, or has."""
    return not world.trained and any(
        rank.trains
        and (
            rank.trained_version == world.iteration + 1
            or (rank.trained_version == world.iteration and _may_train(rank.rank_work))
        )
        for rank in ranks(world)
    )


def _may_train(work: Pending | None) -> bool:
    return work is not None and work.work in (Work.TRAIN, Work.UNKNOWN)


def asked_to_end(world: World) -> list[Worker]:
    """Ranks whose machines asked them to end, and that stay while they may be needed."""
    return [rank for rank in ranks(world) if rank.connected and rank.asked_to_end]


def measuring(world: World) -> bool:
    """Its ranks measure for the choice of a schedule."""
    return any(rank.rank_work is not None and rank.rank_work.work is Work.MEASURE for rank in ranks(world))


def decide(plan: Plan, world: World, now: float) -> list[Decision]:
    """Forms, restarts, or sets the group to work."""
    group = ranks(world)
    if not group:
        return []
    members = [rank for rank in group if _is_member(rank)]
    reason = _broken(world, members, now)
    if reason is not None:
        return _restart(plan, world, members, *reason)
    if not members and all(rank.idle and now >= rank.not_before for rank in group) and world.stop is None:
        return [Form(world.group_epoch + 1)]
    return _train(world) if formed(world) else []


def _is_member(rank: Worker) -> bool:
    forming = rank.rank_work is not None and rank.rank_work.work in (Work.BECOME, Work.UNKNOWN)
    return rank.trains or forming or rank.train_failure is not None


def _broken(world: World, members: list[Worker], now: float) -> tuple[str, bool] | None:
    """(why, counted as a failure) when the group cannot go on."""
    if not members:
        return None
    gone = [rank for rank in ranks(world) if rank.lost or (rank.session and not _is_member(rank))]
    if gone:
        return f"{gone[0].name} was lost", False
    if len({rank.group_epoch for rank in members}) > 1:
        return "its ranks belong to different groups", False
    ahead = world.version if world.trained or not world.ledger.all_scored else world.version + 1
    for rank in members:
        if rank.trained_version > ahead:
            return f"{rank.name} holds a version the journal does not know", False
    for rank in members:
        failure = rank.train_failure
        if failure is not None and (now - rank.failed_at > SUSPECT_SECONDS or rank.asks_restart):
            return f"{rank.name}: {failure.message}", not rank.asks_restart
    return None


def _restart(plan: Plan, world: World, members: list[Worker], reason: str, counted: bool) -> list[Decision]:
    here = tuple(rank.name for rank in members if rank.connected)
    if not here:
        return []
    failure = next((rank.train_failure for rank in members if rank.train_failure is not None), None)
    if counted and failure is not None:
        limit = plan.spec.run_policy.backoff_limit
        if not failure.retryable or world.group_failures >= limit:
            return [Finish("Failed", failure)]
    return [RestartGroup(here, reason, counted)]


def _ending(world: World) -> bool:
    """The job stops, or a rank goes: nothing new is begun."""
    return world.stop is not None or bool(asked_to_end(world))


def _measure(world: World, group: list[Worker]) -> list[Decision]:
    """All ranks at once, or none: a rank that measures waits for the others."""
    wanted = world.schedule.stage in ("stages", "tables") and not _ending(world)
    ready = all(rank.idle and not turns.decodes(world, rank) for rank in group)
    return [MeasureSchedule()] if wanted and ready else []


def _train(world: World) -> list[Decision]:
    group = ranks(world)
    if any(item.from_ranks for worker in world.fleet for item in worker.pending.values()):
        return []
    if any(item.work is Work.CHECKPOINT for rank in group for item in rank.pending.values()):
        return []
    if world.schedule.stage != "decided":
        return _measure(world, group)
    target = world.version
    if not world.trained and world.ledger.all_scored and (not _ending(world) or train_under_way(world)):
        target += 1
    if _ending(world) and not train_under_way(world):
        return []
    ready = [rank for rank in group if rank.idle and rank.trained_version < target]
    decisions: list[Decision] = [Train(rank.name, rank.trained_version) for rank in ready]
    new = any(rank.trained_version == world.iteration for rank in ready)
    return [CommitBatch(), *decisions] if new and not world.trained else decisions


def merged_metrics(world: World) -> dict[str, float]:
    """Metrics of the iteration's training: all ranks report the same, but for their times. Of those, bubbles are the
    mean, mini-batches the slowest rank's, the others the first rank's."""
    told = [
        rank.trained.metrics
        for rank in ranks(world)
        if rank.trained is not None and rank.trained.iteration == world.iteration
    ]
    metrics: dict[str, float] = {}
    for each in reversed(told):
        metrics.update(each)
    if "bubble_seconds" in metrics:
        metrics["bubble_seconds"] = sum(each["bubble_seconds"] for each in told) / len(told)
        metrics["step_seconds"] = max(each["step_seconds"] for each in told)
    return metrics
