"""Which worker is ready for what: whose turn its device is, whose weights are current, who can decode, who can score.

A worker that came back is stale until it holds the weights of the job's version: it gets no samples. A generation
worker that also holds a training rank (spec.placement Colocated) shares its device: training has it until the rank is
at the job's version (its group forms, replays) and knows what its stages cost, and again from the moment a batch is
scored until it is trained; decoding and scoring have it in between. The worker puts the other side to sleep by itself
when a command comes; what follows here is only which commands are sent at all.
Rule: pure, and of the state as it is: nothing is remembered.
"""

from collections.abc import Collection, Iterable, Mapping

from rlhf_common.names import Group
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.state.worker import CommandKind, Worker


def serving_workers(state: JobState) -> frozenset[str]:
    """Return the names of the workers whose device decoding and scoring have now: always that of a worker without a
    training rank, never that of a worker that is only a rank."""
    return frozenset(worker.name for worker in state.fleet if worker.rank is None or _has_turn(state, worker))


def _has_turn(state: JobState, worker: Worker) -> bool:
    batch_waits = state.ledger.all_scored and not state.trained and not state.evaluation.holds_training
    at_version = worker.trains and worker.train_failure is None and worker.trained_version == state.version
    return worker.group is Group.GENERATION and at_version and not batch_waits and state.schedule.stage != "stages"


def current_workers(
    context: JobContext, state: JobState, workers: Iterable[Worker], role: Group, serving: Collection[str]
) -> tuple[Worker, ...]:
    """Return those of `workers` that are idle and have this role, their turn, and every weight of the role at the job's
    version, in their order."""
    models = (context.graph.policy,) if role is Group.GENERATION else context.scored_models
    return tuple(
        worker
        for worker in workers
        if worker.idle
        and role in worker.roles
        and worker.name in serving
        and all(worker.versions.get(model) == state.workers_version for model in models)
    )


def early_scorers(
    workers: Iterable[Worker], scorers: Collection[Worker], serving: Collection[str]
) -> tuple[Worker, ...]:
    """Return those of `workers`, beside the `scorers`, that could score if it were not for the critics' version."""
    ready = {worker.name for worker in scorers}
    return tuple(
        worker
        for worker in workers
        if worker.idle and Group.INFERENCE in worker.roles and worker.name in serving and worker.name not in ready
    )


def is_published(
    context: JobContext, state: JobState, current: Mapping[Group, Collection[Worker]], critic_update_pending: bool
) -> bool:
    """Return whether every worker that can take part in the next iteration is `current`, and each group has one.

    While critics are behind there is only the policy to publish: those who score by critics get them later.

    A worker that is away or only just starting is not waited for: it gets the weights when it is there. Nobody needs
    the weights of a last iteration.
    """
    if state.stop is not None or context.last(state.iteration):
        return True
    scored = () if critic_update_pending else context.scored_models
    for group, models in ((Group.GENERATION, (context.graph.policy,)), (Group.INFERENCE, scored)):
        workers = state.fleet.of(group)
        present = [worker for worker in workers if worker.connected and group in worker.roles]
        up_to_date = {worker.name for worker in current[group]}
        if workers and models and not (present and all(worker.name in up_to_date for worker in present)):
            return False
    return True


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
        and worker.versions.get(context.graph.policy) == state.workers_version
        and (worker.slow_command is None or worker.slow_command.kind is CommandKind.LOAD)
        and not (ledger.decoding_on(worker.name) or ledger.arriving_on(worker.name))
        and not (unplaced and worker.name in pool)
    )
