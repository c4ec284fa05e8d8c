"""Roles and weights: which worker gets which role, and which version it loads from where. Rule: pure."""

from rlhf_common import control_pb2 as pb
from rlhf_common.names import DRAFT_MODEL, Group
from rlhf_coordinator.scheduling import evaluation
from rlhf_coordinator.scheduling.decisions import Decision, PrepareWorker
from rlhf_coordinator.scheduling.derived_state import DerivedState
from rlhf_coordinator.scheduling.training_group import TrainingGroup
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.worker import Worker
from rlhf_planner.speculation.learned_messages import learned_message

Sources = list[pb.WeightLocation] | None
"""Locations of the version that workers need; None when it is unavailable now."""


def decide(context: JobContext, state: JobState, now: float, facts: DerivedState) -> list[Decision]:
    """Return commands for idle workers whose role or weights differ from what the job needs, if available now."""
    unneeded = state.trained and context.last(state.iteration) and not evaluation.wants_last_version(context, state)
    if state.stop is not None or unneeded:
        return []
    sources = _sources(context, state, facts.group)
    whole = None if facts.group.critic_update_pending else sources
    decisions: list[Decision] = []
    for worker in state.fleet.in_group(Group.GENERATION):
        if worker.idle and now >= worker.not_before and worker.name in facts.serving:
            decisions += _generation(context, state, sources, worker, facts)
    for worker in state.fleet.in_group(Group.INFERENCE):
        if worker.idle and now >= worker.not_before:
            decisions += _inference(context, state, whole, worker)
    return decisions


def _sources(context: JobContext, state: JobState, group: TrainingGroup) -> Sources:
    """Return the locations of the ranks that serve the workers' version, for versions above 0; None when they may not
    serve it now."""
    keepers = group.ranks[: context.spec.training.parallelism.keepers]
    if state.workers_version < state.version:  # the ranks train on top of it, or have done so
        available = group.formed and all(rank.keeps(state.workers_version) for rank in keepers)
        return [pb.WeightLocation(address=rank.address) for rank in keepers] if available else None
    batch_waits = state.ledger.all_scored and not state.trained and not state.overlaps_training
    critics_wait = group.critic_update_pending and not state.trained
    if batch_waits or critics_wait or not group.formed or not all(rank.serves(state.version) for rank in keepers):
        return None
    return [pb.WeightLocation(address=rank.address) for rank in keepers]


def _generation(
    context: JobContext, state: JobState, sources: Sources, worker: Worker, facts: DerivedState
) -> list[Decision]:
    if worker.versions.get(context.graph.policy) == state.workers_version and Group.GENERATION in worker.roles:
        return _second_role(context, state, sources, worker, facts) if facts.can_score else []
    load = _load(context, state, sources, context.graph.policy)
    if load is None or evaluation.keeps_weights(context, state, worker):
        return []
    if Group.GENERATION in worker.roles:
        return [_load_decision(worker, load)]
    learned = learned_message(state.speculation.learned) if state.speculation.learned else None
    command = pb.Command(become_generation=pb.BecomeGeneration(weights=load, learned=learned))
    return [PrepareWorker(worker.name, command, _detail(load), load.version, from_ranks=_from_ranks([load]))]


def _second_role(
    context: JobContext, state: JobState, sources: Sources, worker: Worker, facts: DerivedState
) -> list[Decision]:
    """Return the command for the scoring models of a generation worker, if any."""
    if Group.INFERENCE in worker.roles:
        released = worker.name in facts.consolidation.released
        whole = None if facts.group.critic_update_pending else sources
        return _inference(context, state, whole, worker) if released else []
    if state.ledger.decoding_on(worker.name) or state.ledger.arriving_on(worker.name):
        return []
    tasks = [task.name for task in context.tasks]
    command = pb.Command(become_inference=pb.BecomeInference(tasks=tasks, offloaded=True))
    return [PrepareWorker(worker.name, command, f"load its models for {', '.join(tasks)} next to the policy")]


def _inference(context: JobContext, state: JobState, sources: Sources, worker: Worker) -> list[Decision]:
    behind = (model for model in context.scored_models if worker.versions.get(model) != state.workers_version)
    loads = [_load(context, state, sources, model) for model in behind]
    if any(load is None for load in loads):
        return []
    ready = [load for load in loads if load is not None]
    if Group.INFERENCE in worker.roles:
        return [_load_decision(worker, ready[0])] if ready else []
    tasks = [task.name for task in context.tasks]
    command = pb.Command(become_inference=pb.BecomeInference(tasks=tasks, weights=ready))
    detail = f"load its models for {', '.join(tasks)}"
    return [PrepareWorker(worker.name, command, detail, state.workers_version, from_ranks=_from_ranks(ready))]


def _load(context: JobContext, state: JobState, sources: Sources, model: str) -> pb.LoadWeights | None:
    """Return the command to load the workers' version of a model; None when it is unavailable now."""
    version = state.workers_version
    if not version:
        return pb.LoadWeights(model=model, sources=[pb.WeightLocation(folder=context.folder(model))])
    if sources is None:
        return None
    draft_model = DRAFT_MODEL if context.draft_model and model == context.graph.policy else ""
    return pb.LoadWeights(model=model, version=version, sources=sources, draft_model=draft_model)


def _load_decision(worker: Worker, load: pb.LoadWeights) -> PrepareWorker:
    command = pb.Command(load_weights=load)
    return PrepareWorker(worker.name, command, _detail(load), load.version, load.model, _from_ranks([load]))


def _detail(load: pb.LoadWeights) -> str:
    return f"load {load.model} version {load.version}"


def _from_ranks(loads: list[pb.LoadWeights]) -> bool:
    return any(source.address for load in loads for source in load.sources)
