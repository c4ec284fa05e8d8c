"""The state machine of a job: what phase it is in and what to do next, from what is observed.

Level-triggered: `decide` looks at the whole state and says what is missing; it remembers nothing, so it makes no
difference whether a message was lost, a worker came back, or the coordinator itself was restarted. Calling it again
without a change decides nothing new, because what was sent is pending and what was handed out is in the ledger.

  Starting -> Generating (-> Scoring) -> Training -> Publishing -> Checkpointing -> Generating ... -> Complete
  Recovering: training is needed but its group is being restarted. Failed and Stopped end the job from anywhere.

Rule: pure; no clock, no I/O. Training starts only when every sample is scored.
"""

from typing import Final

from rlhf_api import control_pb2 as pb
from rlhf_api.names import ExitCode
from rlhf_coordinator.scheduling import consolidation, dispatch, incremental, release, training_group, waits, weights
from rlhf_coordinator.scheduling.decisions import (
    CloseIteration,
    CommitTrained,
    Decision,
    ExitWorker,
    Finish,
    SaveCheckpoint,
)
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_planner.inter_stage.tail_placement import Move

TOGETHER_SECONDS: Final = 10.0
"""A node that is drained asks all its pods to end within seconds of each other."""


def phase(context: JobContext, state: JobState) -> str:
    """The phase of a job that has not ended."""
    if not state.trained:
        if not state.ledger.all_generated:
            return "Generating" if state.ever_ready else "Starting"
        if not state.ledger.all_scored:
            return "Scoring"
        begun = training_group.version(state) == state.iteration or training_group.train_under_way(state)
        begun = begun or training_group.measuring(state)
        return "Training" if begun else _without_group(state)
    group_ready = training_group.version(state) == state.version
    if not _published(context, state):
        return "Publishing" if group_ready else _without_group(state)
    if _checkpoint_due(context, state) and state.checkpoint.stage == "idle" and not group_ready:
        return _without_group(state)
    return "Checkpointing"


def decide(context: JobContext, state: JobState, now: float) -> list[Decision]:
    """What to do now, in this order."""
    if state.failure is not None:
        return [Finish("Failed", state.failure)]
    if state.deadline is not None and now > state.deadline:
        return [Finish("Failed", _deadline(context))]
    decisions = _overdue(context, state, now)
    decisions += training_group.decide(context, state, now)
    decisions += _samples(context, state, now)
    if not state.trained:
        if training_group.version(state) == state.iteration + 1 and state.ledger.all_scored:
            decisions.append(CommitTrained())
        elif state.stop is not None:
            decisions += _stop(context, state, now)
    else:
        decisions += _after_training(context, state, now)
    if not any(isinstance(each, SaveCheckpoint | Finish | CommitTrained | CloseIteration) for each in decisions):
        decisions += _drain(context, state, now)
    return decisions


def _samples(context: JobContext, state: JobState, now: float) -> list[Decision]:
    """What generation and inference workers become, load, decode and score; where the tail gathers."""
    decoders = [] if release.measuring(context, state) else release.decoders(context, state)
    pool: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    if release.gathering(context, state):
        pool, moves = release.placement(context, state)
        decoders = [worker for worker in decoders if worker.name in pool]
    else:
        moves = release.balancing(context, state, now)
    released = release.released(context, state, pool)
    names = {worker.name for worker in released}
    return [
        *weights.decide(context, state, now, names, release.doubles(context, state)),
        *consolidation.decide(context, state, moves, released),
        *dispatch.decide(context, state, now, decoders, released),
        *incremental.decide(context, state, now, released),
    ]


def _without_group(state: JobState) -> str:
    return "Recovering" if state.ever_ready else "Starting"


def _published(context: JobContext, state: JobState) -> bool:
    """Nobody needs the weights of a last iteration."""
    return state.stop is not None or context.last(state.iteration) or weights.published(context, state)


def _checkpoint_due(context: JobContext, state: JobState) -> bool:
    """A checkpoint of the job's version is wanted and does not exist."""
    settings = context.spec.checkpoints
    if settings is None or state.checkpoint.newest >= state.version:
        return False
    if state.stop is not None:
        return state.stop.checkpoint
    return state.trained and (state.version % settings.every == 0 or context.last(state.iteration))


def _after_training(context: JobContext, state: JobState, now: float) -> list[Decision]:
    if not _published(context, state) or state.checkpoint.stage != "idle":
        return []
    if _checkpoint_due(context, state):
        return _save(context, state, now)
    if any(item.from_ranks for worker in state.fleet for item in worker.pending.values()) and state.stop is not None:
        return []
    return [CloseIteration()]


def _stop(context: JobContext, state: JobState, now: float) -> list[Decision]:
    """A running optimizer batch is finished first; a group that is away is not waited for: the journal has it all."""
    if training_group.train_under_way(state) or state.checkpoint.stage != "idle":
        return []
    if _checkpoint_due(context, state) and training_group.version(state) == state.version:
        return _save(context, state, now)
    return [Finish("Stopped")]


def _drain(context: JobContext, state: JobState, now: float) -> list[Decision]:
    """Ranks that were asked to end go once a checkpoint has what the group holds, so that nothing is trained again.

    The coordinator may be asked at the same moment; it then needs them until it has ended.
    """
    going = training_group.draining(state)
    if not going or state.stop is not None or now - min(rank.draining_since for rank in going) < TOGETHER_SECONDS:
        return []
    busy = training_group.train_under_way(state) or any(rank.rank_command for rank in training_group.ranks(state))
    read = any(item.from_ranks for worker in state.fleet for item in worker.pending.values())
    if busy or read or state.checkpoint.stage != "idle":
        return []
    whole = training_group.version(state) == state.version
    if whole and context.spec.checkpoints is not None and state.checkpoint.newest < state.version:
        return _save(context, state, now)
    return [ExitWorker(rank.name, ExitCode.OK, "it was asked to end, and is not needed now") for rank in going]


def _save(context: JobContext, state: JobState, now: float) -> list[Decision]:
    ready = training_group.version(state) == state.version and now >= state.checkpoint.not_before
    return [SaveCheckpoint(state.version)] if ready else []


def _overdue(context: JobContext, state: JobState, now: float) -> list[Decision]:
    """A wait that took too long: a stuck worker restarts, an absent one that is needed fails a job without pods."""
    limit = context.spec.run_policy.start_timeout_seconds
    decisions: list[Decision] = []
    for wait in waits.waits(context, state, now - limit):
        if now - wait.since <= limit + wait.allowance:
            continue
        message = f"waited {now - wait.since:.0f} s for {wait.description}"
        if wait.stuck:
            decisions.append(ExitWorker(wait.worker, ExitCode.RESTART, message))
        elif wait.fatal:
            failure = pb.Failure(
                reason="TimedOut",
                field="spec.runPolicy.startTimeoutSeconds",
                message=message,
                exit_code=ExitCode.FAILED,
            )
            decisions.append(Finish("Failed", failure))
    return decisions


def _deadline(context: JobContext) -> pb.Failure:
    seconds = context.spec.run_policy.active_deadline_seconds
    message = f"the job ran for more than its {seconds} s"
    return pb.Failure(
        reason="DeadlineExceeded",
        field="spec.runPolicy.activeDeadlineSeconds",
        message=message,
        exit_code=ExitCode.FAILED,
    )
