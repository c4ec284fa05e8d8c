"""The state machine of a job: what phase it is in and what to do next, from what is observed.

Level-triggered: `decide` looks at the whole world and says what is missing; it remembers nothing, so it makes no
difference whether a message was lost, a worker came back, or the coordinator itself was restarted. Calling it again
without a change decides nothing new, because what was sent is pending and what was handed out is in the ledger.

  Starting -> Generating (-> Scoring) -> Training -> Publishing -> Checkpointing -> Generating ... -> Complete
  Recovering: training is needed but its group is being restarted. Failed and Stopped end the job from anywhere.

Rule: pure; no clock, no I/O. Training starts only when every sample is scored.
"""

from typing import Final

from rlhf_api import control_pb2 as pb
from rlhf_api.names import ExitCode
from rlhf_operator.coordinator.deciding import dispatch, incremental, release, tail, training_group, waits, weights
from rlhf_operator.coordinator.deciding.decisions import (
    CloseIteration,
    CommitTrained,
    Decision,
    Finish,
    Leave,
    SaveCheckpoint,
)
from rlhf_operator.coordinator.world.world import Plan, World
from rlhf_planner.inter_stage.place import Move

TOGETHER_SECONDS: Final = 10.0
"""A node that is drained asks all its pods to end within seconds of each other."""


def phase(plan: Plan, world: World) -> str:
    """The phase of a job that has not ended."""
    if not world.trained:
        if not world.ledger.all_generated:
            return "Generating" if world.ever_ready else "Starting"
        if not world.ledger.all_scored:
            return "Scoring"
        begun = training_group.version(world) == world.iteration or training_group.train_under_way(world)
        begun = begun or training_group.measuring(world)
        return "Training" if begun else _without_group(world)
    group_ready = training_group.version(world) == world.version
    if not _published(plan, world):
        return "Publishing" if group_ready else _without_group(world)
    if _checkpoint_due(plan, world) and world.checkpoint.stage == "idle" and not group_ready:
        return _without_group(world)
    return "Checkpointing"


def decide(plan: Plan, world: World, now: float) -> list[Decision]:
    """What to do now, in this order."""
    if world.failure is not None:
        return [Finish("Failed", world.failure)]
    if world.deadline is not None and now > world.deadline:
        return [Finish("Failed", _deadline(plan))]
    decisions = _overdue(plan, world, now)
    decisions += training_group.decide(plan, world, now)
    decisions += _samples(plan, world, now)
    if not world.trained:
        if training_group.version(world) == world.iteration + 1 and world.ledger.all_scored:
            decisions.append(CommitTrained())
        elif world.stop is not None:
            decisions += _stop(plan, world, now)
    else:
        decisions += _after_training(plan, world, now)
    if not any(isinstance(each, SaveCheckpoint | Finish | CommitTrained | CloseIteration) for each in decisions):
        decisions += _drain(plan, world, now)
    return decisions


def _samples(plan: Plan, world: World, now: float) -> list[Decision]:
    """What generation and inference workers become, load, decode and score; where the tail gathers."""
    decoders = [] if release.measuring(plan, world) else release.decoders(plan, world)
    pool: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    if release.gathering(plan, world):
        pool, moves = release.placement(plan, world)
        decoders = [worker for worker in decoders if worker.name in pool]
    else:
        moves = release.balancing(plan, world, now)
    released = release.released(plan, world, pool)
    names = {worker.name for worker in released}
    return [
        *weights.decide(plan, world, now, names, release.doubles(plan, world)),
        *tail.decide(plan, world, moves, released),
        *dispatch.decide(plan, world, now, decoders, released),
        *incremental.decide(plan, world, now, released),
    ]


def _without_group(world: World) -> str:
    return "Recovering" if world.ever_ready else "Starting"


def _published(plan: Plan, world: World) -> bool:
    """Nobody needs the weights of a last iteration."""
    return world.stop is not None or plan.last(world.iteration) or weights.published(plan, world)


def _checkpoint_due(plan: Plan, world: World) -> bool:
    """A checkpoint of the job's version is wanted and does not exist."""
    settings = plan.spec.checkpoints
    if settings is None or world.checkpoint.newest >= world.version:
        return False
    if world.stop is not None:
        return world.stop.checkpoint
    return world.trained and (world.version % settings.every == 0 or plan.last(world.iteration))


def _after_training(plan: Plan, world: World, now: float) -> list[Decision]:
    if not _published(plan, world) or world.checkpoint.stage != "idle":
        return []
    if _checkpoint_due(plan, world):
        return _save(plan, world, now)
    if any(item.from_ranks for worker in world.fleet for item in worker.pending.values()) and world.stop is not None:
        return []
    return [CloseIteration()]


def _stop(plan: Plan, world: World, now: float) -> list[Decision]:
    """A running optimizer batch is finished first; a group that is away is not waited for: the journal has it all."""
    if training_group.train_under_way(world) or world.checkpoint.stage != "idle":
        return []
    if _checkpoint_due(plan, world) and training_group.version(world) == world.version:
        return _save(plan, world, now)
    return [Finish("Stopped")]


def _drain(plan: Plan, world: World, now: float) -> list[Decision]:
    """Ranks that were asked to end go once a checkpoint has what the group holds, so that nothing is trained again.

    The coordinator may be asked at the same moment; it then needs them until it has ended.
    """
    going = training_group.asked_to_end(world)
    if not going or world.stop is not None or now - min(rank.asked_to_end for rank in going) < TOGETHER_SECONDS:
        return []
    busy = training_group.train_under_way(world) or any(rank.rank_work for rank in training_group.ranks(world))
    read = any(item.from_ranks for worker in world.fleet for item in worker.pending.values())
    if busy or read or world.checkpoint.stage != "idle":
        return []
    whole = training_group.version(world) == world.version
    if whole and plan.spec.checkpoints is not None and world.checkpoint.newest < world.version:
        return _save(plan, world, now)
    return [Leave(rank.name, ExitCode.OK, "it was asked to end, and is not needed now") for rank in going]


def _save(plan: Plan, world: World, now: float) -> list[Decision]:
    ready = training_group.version(world) == world.version and now >= world.checkpoint.not_before
    return [SaveCheckpoint(world.version)] if ready else []


def _overdue(plan: Plan, world: World, now: float) -> list[Decision]:
    """A wait that took too long: a stuck worker restarts, an absent one that is needed fails a job without pods."""
    limit = plan.spec.run_policy.start_timeout_seconds
    decisions: list[Decision] = []
    for wait in waits.waits(plan, world, now - limit):
        if now - wait.since <= limit + wait.allowance:
            continue
        message = f"waited {now - wait.since:.0f} s for {wait.sentence}"
        if wait.stuck:
            decisions.append(Leave(wait.worker, ExitCode.RESTART, message))
        elif wait.fatal:
            failure = pb.Failure(
                reason="TimedOut",
                field="spec.runPolicy.startTimeoutSeconds",
                message=message,
                exit_code=ExitCode.FAILED,
            )
            decisions.append(Finish("Failed", failure))
    return decisions


def _deadline(plan: Plan) -> pb.Failure:
    seconds = plan.spec.run_policy.active_deadline_seconds
    message = f"the job ran for more than its {seconds} s"
    return pb.Failure(
        reason="DeadlineExceeded",
        field="spec.runPolicy.activeDeadlineSeconds",
        message=message,
        exit_code=ExitCode.FAILED,
    )
