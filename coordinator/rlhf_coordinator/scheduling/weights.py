"""Roles and weights: which worker must become what, and load which version, from where.

Where generation workers score too, they become inference as well, their models offloaded. Trained scoring models are
brought up to date on them only when they are released: publishing waits for the policy alone.

Version 0 is in the manifest's folders; a later one is served by the training ranks of data replica 0, whose stages
together hold every parameter. A worker that came back is stale until it holds the current version: it gets no samples.
Rule: pure. No load starts from ranks while a complete batch waits for them, and none while they train.
"""

from collections.abc import Collection

from rlhf_api import control_pb2 as pb
from rlhf_api.names import Group
from rlhf_coordinator.scheduling import training_group, turns
from rlhf_coordinator.scheduling.decisions import Decision, PrepareWorker
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.worker import Worker


def sources(context: JobContext, state: JobState, model: str, version: int) -> list[pb.WeightLocation] | None:
    """Where a version of a model is; None when nobody can serve it now."""
    if version == 0:
        return [pb.WeightLocation(folder=context.folder(model))]
    stages = training_group.ranks(state)[: context.spec.training.parallelism.pipeline]
    waiting = state.ledger.all_scored and not state.trained
    if waiting or not training_group.formed(state) or not all(rank.serves(version) for rank in stages):
        return None
    return [pb.WeightLocation(address=rank.address) for rank in stages]


def decide(
    context: JobContext, state: JobState, now: float, released: Collection[str], doubles: bool
) -> list[Decision]:
    """Commands for every idle worker whose role or weights are not what the job needs now. `released`: generation
    workers that score now; `doubles`: generation workers hold the scoring models too."""
    if state.stop is not None or (state.trained and context.last(state.iteration)):
        return []
    decisions: list[Decision] = []
    for worker in state.fleet.of(Group.GENERATION):
        if worker.idle and now >= worker.not_before and turns.decodes(state, worker):
            decisions += _generation(context, state, worker, doubles, worker.name in released)
    for worker in state.fleet.of(Group.INFERENCE):
        if worker.idle and now >= worker.not_before:
            decisions += _inference(context, state, worker)
    return decisions


def current(context: JobContext, state: JobState, worker: Worker, role: Group) -> bool:
    """It has this role, every weight that the role needs at the job's version, and its turn."""
    if not worker.idle or role not in worker.roles or not turns.decodes(state, worker):
        return False
    models = (context.graph.policy,) if role is Group.GENERATION else context.scored_models
    return all(worker.versions.get(model) == state.version for model in models)


def published(context: JobContext, state: JobState) -> bool:
    """Every worker that can take part in the next iteration holds its version, and there is one in each group.

    A worker that is away or only just starting is not waited for: it gets the weights when it is there.
    """
    for group, models in ((Group.GENERATION, (context.graph.policy,)), (Group.INFERENCE, context.scored_models)):
        workers = state.fleet.of(group)
        here = [worker for worker in workers if worker.connected and group in worker.roles]
        if workers and models and not (here and all(current(context, state, worker, group) for worker in here)):
            return False
    return True


def _generation(context: JobContext, state: JobState, worker: Worker, doubles: bool, released: bool) -> list[Decision]:
    if worker.versions.get(context.graph.policy) == state.version and Group.GENERATION in worker.roles:
        return _second_role(context, state, worker, released) if doubles else []
    load = _load(context, state, context.graph.policy)
    if load is None:
        return []
    if Group.GENERATION in worker.roles:
        return [_load_decision(worker, load)]
    command = pb.Command(become_generation=pb.BecomeGeneration(weights=load))
    return [PrepareWorker(worker.name, command, _detail(load), load.version, from_ranks=_from_ranks([load]))]


def _second_role(context: JobContext, state: JobState, worker: Worker, released: bool) -> list[Decision]:
    """The scoring models of a generation worker: at version 0 beside the policy, and current once it is released."""
    if Group.INFERENCE in worker.roles:
        return _inference(context, state, worker) if released else []
    if state.ledger.decoding_on(worker.name) or state.ledger.arriving_on(worker.name):
        return []
    tasks = [task.name for task in context.tasks]
    command = pb.Command(become_inference=pb.BecomeInference(tasks=tasks, offloaded=True))
    return [PrepareWorker(worker.name, command, f"load its models for {', '.join(tasks)} beside the policy")]


def _inference(context: JobContext, state: JobState, worker: Worker) -> list[Decision]:
    loads = [_load(context, state, m) for m in context.scored_models if worker.versions.get(m) != state.version]
    if any(load is None for load in loads):
        return []
    ready = [load for load in loads if load is not None]
    if Group.INFERENCE in worker.roles:
        return [_load_decision(worker, ready[0])] if ready else []
    tasks = [task.name for task in context.tasks]
    command = pb.Command(become_inference=pb.BecomeInference(tasks=tasks, weights=ready))
    detail = f"load its models for {', '.join(tasks)}"
    return [PrepareWorker(worker.name, command, detail, state.version, from_ranks=_from_ranks(ready))]


def _load(context: JobContext, state: JobState, model: str) -> pb.LoadWeights | None:
    found = sources(context, state, model, state.version)
    return None if found is None else pb.LoadWeights(model=model, version=state.version, sources=found)


def _load_decision(worker: Worker, load: pb.LoadWeights) -> PrepareWorker:
    command = pb.Command(load_weights=load)
    return PrepareWorker(worker.name, command, _detail(load), load.version, load.model, _from_ranks([load]))


def _detail(load: pb.LoadWeights) -> str:
    return f"load {load.model} version {load.version}"


def _from_ranks(loads: list[pb.LoadWeights]) -> bool:
    return any(source.address for load in loads for source in load.sources)
