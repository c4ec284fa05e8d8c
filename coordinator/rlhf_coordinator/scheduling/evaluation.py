"""Evaluation: when a weight version is evaluated, which workers decode and score its responses, and what waits for it.

Rule: pure; decoding for an evaluation waits while samples of the batch are queued.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from rlhf_common.names import Group
from rlhf_coordinator.scheduling.decisions import (
    BeginEvaluation,
    Decision,
    Generate,
    GiveUpEvaluation,
    Score,
)
from rlhf_coordinator.scheduling.derived_state import DerivedState
from rlhf_coordinator.state.evaluation_state import evaluation_tasks
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.worker import Worker

SCORES_IN_FLIGHT: Final = 32
"""Number of responses of an evaluation from which a worker gets no more to score."""


def decide(context: JobContext, state: JobState, now: float, facts: DerivedState) -> list[Decision]:
    """Return the next decisions about the evaluation; empty without one, and in a stopping job."""
    if context.spec.evaluation is None or state.stop is not None:
        return []
    if final_is_due(context, state) and not state.evaluation.unfinished:
        return [BeginEvaluation(state.version)]
    ledger = state.evaluation.ledger
    if ledger is None or not state.evaluation.unfinished:
        return []
    if _is_lost(context, state, ledger):
        return [GiveUpEvaluation(ledger.iteration)]
    return [*_generate(context, ledger, _decoders(context, state, ledger, facts)), *_score(context, state, now, facts)]


def final_is_due(context: JobContext, state: JobState) -> bool:
    """Return whether the job evaluates, its last version exists, and the evaluation's ledger is not of this version."""
    if context.spec.evaluation is None or not state.trained or not context.last(state.iteration):
        return False
    ledger = state.evaluation.ledger
    return ledger is None or ledger.iteration != state.version


def wants_last_version(context: JobContext, state: JobState) -> bool:
    """Return whether generation workers need the last version of the job, for its evaluation."""
    ledger = state.evaluation.ledger
    own = ledger is not None and ledger.iteration == state.version and state.evaluation.decodes
    return final_is_due(context, state) or (own and context.last(state.iteration))


def keeps_open(context: JobContext, state: JobState) -> bool:
    """Return whether the iteration must not be closed yet because of an evaluation."""
    return state.stop is None and (state.evaluation.unfinished or final_is_due(context, state))


def keeps_weights(context: JobContext, state: JobState, worker: Worker) -> bool:
    """Return whether a worker must not load the job's version yet, because it has an earlier one whose evaluation it
    decodes, or may decode."""
    ledger = state.evaluation.ledger
    if ledger is None or ledger.iteration == state.version or state.stop is not None:
        return False
    return worker.versions.get(context.graph.policy) == ledger.iteration and state.evaluation.needs(worker.name)


def waits(context: JobContext, state: JobState, facts: DerivedState) -> bool:
    """Return whether the iteration waits only for the evaluation."""
    if not keeps_open(context, state):
        return False
    if state.evaluation.holds_training:
        return state.ledger.all_scored
    if not state.trained:
        return False
    weights_in_use = any(keeps_weights(context, state, worker) for worker in state.fleet.in_group(Group.GENERATION))
    return weights_in_use or (facts.published and state.checkpoint.stage == "idle" and not facts.checkpoint_due)


def _is_lost(context: JobContext, state: JobState, ledger: Ledger) -> bool:
    """Return whether responses are missing, no generation worker has the version, and none can get it."""
    if ledger.all_generated or (ledger.iteration == state.version and not _gone(state)):
        return False
    return not any(
        worker.versions.get(context.graph.policy) == ledger.iteration
        for worker in state.fleet.in_group(Group.GENERATION)
    )


def _gone(state: JobState) -> bool:
    """Return whether the complete batch waits for the evaluation of a trained version, which no rank serves then."""
    return state.evaluation.holds_training and state.ledger.all_scored and bool(state.version)


def _decoders(context: JobContext, state: JobState, ledger: Ledger, facts: DerivedState) -> list[Worker]:
    """Return the workers that may decode responses, released workers first."""
    batch, tail = state.ledger, facts.consolidation
    if facts.measures or batch.queued(1) or batch.isolated():
        return []
    scorers = {worker.name for worker in facts.scorers} if batch.unscored() else set()
    free = [
        worker
        for worker in state.fleet.in_group(Group.GENERATION)
        if worker.idle
        and Group.GENERATION in worker.roles
        and worker.draws_by_request
        and worker.versions.get(context.graph.policy) == ledger.iteration
        and worker.name in facts.serving
        and not (batch.decoding_on(worker.name) or batch.arriving_on(worker.name) or batch.scoring_on(worker.name))
        and worker.name not in scorers
    ]
    if tail.planned and not batch.all_generated:
        return [worker for worker in free if worker.name in tail.released]
    return sorted(free, key=lambda worker: worker.name not in tail.released)


def _generate(context: JobContext, ledger: Ledger, workers: Sequence[Worker]) -> Iterable[Decision]:
    """Return leases of queued responses to the least loaded workers, as many as each decodes at once; isolated ones
    alone."""
    capacity = context.spec.generation.max_batch_size
    load = {
        worker.name: ledger.decoding_on(worker.name) for worker in workers if not ledger.holds_isolated(worker.name)
    }
    assigned: dict[str, list[int]] = {}
    for index in ledger.queued(sum(max(0, capacity - count) for count in load.values())):
        name = min(load, key=lambda worker: load[worker])
        assigned.setdefault(name, []).append(index)
        load[name] += 1
    if not assigned:
        idle = [name for name, count in load.items() if not count]
        assigned = {name: [index] for name, index in zip(idle, ledger.isolated(), strict=False)}
    return [Generate(name, tuple(samples), evaluation=True) for name, samples in assigned.items()]


def _score(context: JobContext, state: JobState, now: float, facts: DerivedState) -> Iterable[Decision]:
    ledger = state.evaluation.ledger
    assert ledger is not None
    if not ledger.unscored():
        return []
    tasks = tuple(task.name for task in evaluation_tasks(context.graph))
    load = {name: ledger.scoring_on(name, tasks) for name in _judges(state, facts)}
    assigned: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
    for index in ledger.unscored():
        sample = ledger.samples[index]
        open_tasks = tuple(task for task in tasks if task in sample.open_tasks)
        if now < sample.not_before or not open_tasks:
            continue
        name = min(load, key=lambda worker: load[worker], default="")
        if not name or load[name] >= SCORES_IN_FLIGHT * len(tasks):
            break
        assigned.setdefault(name, []).append((index, open_tasks))
        load[name] += len(open_tasks)
    return [Score(name, tuple(samples), evaluation=True) for name, samples in assigned.items()]


def _judges(state: JobState, facts: DerivedState) -> Collection[str]:
    """Return the workers that can score: idle inference workers.

    Without an inference group, they are idle generation workers that have the device and decode no sample of the batch.
    """
    able = [worker for worker in state.fleet if worker.idle and Group.INFERENCE in worker.roles]
    of_group = [worker.name for worker in able if worker.group is Group.INFERENCE]
    if of_group or state.fleet.sizes.get(Group.INFERENCE):
        return of_group
    return [
        worker.name for worker in able if worker.name in facts.serving and not state.ledger.decoding_on(worker.name)
    ]
