"""Which worker is ready for what: whose turn its device is, whose weights are current, who can decode, who can score.

A worker that came back is stale until it holds the weights of the job's version: it gets no samples. A generation
worker that also holds a training rank (spec.placement Colocated) shares its device: training has it until the rank is
at the job's version (its group forms, replays) and knows what its stages cost, and again from the moment a batch is
scored until it is trained; decoding and scoring have it in between. The worker puts the other side to sleep by itself
when a command comes; what follows here is only which commands are sent at all.
Rule: pure, and of the state as it is: nothing is remembered.
"""

from collections.abc import Collection

from rlhf_api.names import Group
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.state.worker import CommandKind, Worker


def has_turn(state: JobState, worker: Worker) -> bool:
    """Whether decoding and scoring have the worker's device now: always without a training rank, never on a worker
    that is only a rank."""
    if worker.rank is None:
        return True
    if worker.group is not Group.GENERATION:
        return False
    batch_waits = state.ledger.all_scored and not state.trained
    at_version = worker.trains and worker.train_failure is None and worker.trained_version == state.version
    return at_version and not batch_waits and state.schedule.stage != "stages"


def is_current(context: JobContext, state: JobState, worker: Worker, role: Group) -> bool:
    """Whether the worker is idle and has this role, its turn, and every weight of the role at the job's version."""
    if not worker.idle or role not in worker.roles or not has_turn(state, worker):
        return False
    models = (context.graph.policy,) if role is Group.GENERATION else context.scored_models
    return all(worker.versions.get(model) == state.version for model in models)


def is_published(context: JobContext, state: JobState) -> bool:
    """Whether every worker that can take part in the next iteration holds its version, and each group has one.

    A worker that is away or only just starting is not waited for: it gets the weights when it is there. Nobody needs
    the weights of a last iteration.
    """
    if state.stop is not None or context.last(state.iteration):
        return True
    for group, models in ((Group.GENERATION, (context.graph.policy,)), (Group.INFERENCE, context.scored_models)):
        workers = state.fleet.of(group)
        present = [worker for worker in workers if worker.connected and group in worker.roles]
        if workers and models and not (present and all(is_current(context, state, w, group) for w in present)):
            return False
    return True


def ready_to_decode(context: JobContext, state: JobState, can_score: bool) -> tuple[Worker, ...]:
    """Return the generation workers that can decode now, by index. Where they `can_score`, both roles are there."""
    return tuple(
        worker
        for worker in state.fleet.of(Group.GENERATION)
        if is_current(context, state, worker, Group.GENERATION) and (not can_score or Group.INFERENCE in worker.roles)
    )


def free_to_score(context: JobContext, state: JobState, pool: Collection[str]) -> tuple[Worker, ...]:
    """Return the generation workers with both roles and the iteration's policy that have nothing left to decode, by
    index. What is queued or on its way may still come to the `pool`. One that loads a scoring model counts too."""
    ledger = state.ledger
    unplaced = ledger.count(SampleState.QUEUED, SampleState.MIGRATING) > 0
    return tuple(
        worker
        for worker in state.fleet.of(Group.GENERATION)
        if worker.connected
        and worker.roles >= {Group.GENERATION, Group.INFERENCE}
        and worker.versions.get(context.graph.policy) == state.version
        and (worker.slow_command is None or worker.slow_command.kind is CommandKind.LOAD)
        and not (ledger.decoding_on(worker.name) or ledger.arriving_on(worker.name))
        and not (unplaced and worker.name in pool)
    )


def ready_to_score(context: JobContext, state: JobState, released: Collection[str]) -> tuple[Worker, ...]:
    """Return the workers that can be given finished samples now: of the inference group, and those that are
    `released`."""
    candidates = (*state.fleet.of(Group.INFERENCE), *(state.fleet.workers[name] for name in released))
    return tuple(worker for worker in candidates if is_current(context, state, worker, Group.INFERENCE))
