"""The readiness of workers: whose turn its device is, whether its weights are current, whether it can decode or score.

Rule: pure.
"""

from collections.abc import Collection, Iterable, Mapping

from rlhf_common.names import Group
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.state.worker import CommandKind, Worker


def serving_workers(state: JobState) -> frozenset[str]:
    """Return the names of the workers whose device currently serves decoding and scoring.

    These are the workers without a training rank, and those with a rank that have the turn.
    """
    return frozenset(worker.name for worker in state.fleet if worker.rank is None or _has_turn(state, worker))


def _has_turn(state: JobState, worker: Worker) -> bool:
    batch_waits = state.ledger.all_scored and not state.trained and not state.evaluation.holds_training
    at_version = worker.trains and worker.train_failure is None and worker.trained_version == state.version
    return worker.group is Group.GENERATION and at_version and not batch_waits and state.schedule.stage != "stages"


def current_workers(
    context: JobContext, state: JobState, workers: Iterable[Worker], role: Group, serving: Collection[str]
) -> tuple[Worker, ...]:
    """Return the idle `workers` with this role, the turn of the device, and the trained weights of the role."""
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
    """Return the idle `workers` with the inference role and the turn of the device that are not among `scorers`."""
    ready = {worker.name for worker in scorers}
    return tuple(
        worker
        for worker in workers
        if worker.idle and Group.INFERENCE in worker.roles and worker.name in serving and worker.name not in ready
    )


def is_published(
    context: JobContext, state: JobState, current: Mapping[Group, Collection[Worker]], critic_update_pending: bool
) -> bool:
    """Return whether each group that loads weights has a connected worker with its role, and all these are `current`.

    True in the last iteration and in a stopping job.
    """
    if state.stop is not None or context.last(state.iteration):
        return True
    scored = () if critic_update_pending else context.scored_models
    for group, models in ((Group.GENERATION, (context.graph.policy,)), (Group.INFERENCE, scored)):
        workers = state.fleet.in_group(group)
        present = [worker for worker in workers if worker.connected and group in worker.roles]
        up_to_date = {worker.name for worker in current[group]}
        if workers and models and not (present and all(worker.name in up_to_date for worker in present)):
            return False
    return True


def free_to_score(context: JobContext, state: JobState, pool: Collection[str]) -> tuple[Worker, ...]:
    """Return the connected generation workers with both roles and the current policy that have no samples, by index.

    Workers of the `pool` are left out while samples are queued or moving.
    """
    ledger = state.ledger
    unplaced = ledger.count(SampleState.QUEUED, SampleState.MIGRATING) > 0
    return tuple(
        worker
        for worker in state.fleet.in_group(Group.GENERATION)
        if worker.connected
        and worker.roles >= {Group.GENERATION, Group.INFERENCE}
        and worker.versions.get(context.graph.policy) == state.workers_version
        and (worker.slow_command is None or worker.slow_command.kind is CommandKind.LOAD)
        and not (ledger.decoding_on(worker.name) or ledger.arriving_on(worker.name))
        and not (unplaced and worker.name in pool)
    )
