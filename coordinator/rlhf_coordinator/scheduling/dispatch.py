"""Dispatch: leases queued samples to generation workers, and scoring tasks to scorers. Rule: pure.

An isolated sample is decoded alone.
"""

import heapq
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from rlhf_common.names import Group
from rlhf_coordinator.scheduling import incremental_dispatch
from rlhf_coordinator.scheduling.decisions import Decision, Generate, Score, ScoreGroup
from rlhf_coordinator.scheduling.derived_state import DerivedState
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import Sample, SampleState
from rlhf_coordinator.state.worker import Worker

PREFETCH_SHARE: Final = 8
"""Divisor of the batch: a worker has 1/8 more samples than it decodes at once, and at least one more."""

SCORES_IN_FLIGHT: Final = 64
"""Number of samples from which a scorer gets no more; for tasks of whole groups, of leased (sample, task) pairs."""

SHARES: Final = 2
"""Divisor: the limit of each of n workers is 1 / (2 n) of the unscored samples, within the limits."""

MIN_IN_FLIGHT: Final = 4
"""Least limit of samples per worker."""

MAX_SORTED: Final = 4096
"""Most waiting samples that are sorted by length in a round."""

SCORE_CHUNK: Final = 16
"""Most samples in one Score command."""

_Kind = tuple[tuple[str, ...], int, tuple[Worker, ...]]
"""(tasks leased together, most samples of them per worker, workers that may get them)."""


def decide(context: JobContext, state: JobState, now: float, facts: DerivedState) -> list[Decision]:
    """Return the leases of queued samples and open scoring tasks, as far as workers have capacity.

    The result is empty in a trained iteration and in a stopping job.
    """
    if state.trained or state.stop is not None:
        return []
    scores = [*_score(context, state, now, facts), *_score_groups(context, state, now, facts)]
    return [*_generate(context, state, facts.decoders), *scores]


def _generate(context: JobContext, state: JobState, workers: Sequence[Worker]) -> list[Decision]:
    ledger = state.ledger
    if not ledger.queued(1):
        return _alone(state, workers)
    batch = context.spec.generation.max_batch_size
    capacity = batch + max(1, batch // PREFETCH_SHARE)
    workers = [worker for worker in workers if not ledger.holds_isolated(worker.name)]
    room = [max(0, capacity - ledger.decoding_on(worker.name) - ledger.arriving_on(worker.name)) for worker in workers]
    queued = ledger.queued(sum(room))
    assigned = _to_destinations(state, queued, workers, room)
    reserved = {index for samples in assigned.values() for index in samples}
    loads = [(capacity - free, order) for order, free in enumerate(room)]
    heapq.heapify(loads)
    for index in queued:
        if index in reserved:
            continue
        load, order = heapq.heappop(loads)
        if loads and workers[order].name == ledger.samples[index].faults.worker and loads[0][0] < capacity:
            load, order = heapq.heapreplace(loads, (load, order))
        assigned.setdefault(order, []).append(index)
        # A full worker never comes first again, because the room above counts only free capacity.
        heapq.heappush(loads, (load + 1, order))
    return [Generate(workers[order].name, tuple(samples)) for order, samples in sorted(assigned.items())]


def _to_destinations(
    state: JobState, queued: Iterable[int], workers: Sequence[Worker], room: list[int]
) -> dict[int, list[int]]:
    """Return position of a worker -> queued samples whose last balancing move led to it, and take them off its `room`.

    A sample that last failed on its destination, or finds it full, is left out.
    """
    positions = {worker.name: order for order, worker in enumerate(workers)}
    assigned: dict[int, list[int]] = {}
    for index in queued:
        wanted = state.fusion.destinations.get(index, "")
        order = positions.get(wanted)
        if order is None or not room[order] or wanted == state.ledger.samples[index].faults.worker:
            continue
        room[order] -= 1
        assigned.setdefault(order, []).append(index)
    return assigned


def _alone(state: JobState, workers: Sequence[Worker]) -> list[Decision]:
    """Return leases of isolated samples to workers without samples, one each, elsewhere than where they last failed.

    A single worker may get a sample that failed on it.
    """
    ledger = state.ledger
    if not ledger.isolated():
        return []
    idle = [
        worker.name for worker in workers if not ledger.decoding_on(worker.name) and not ledger.arriving_on(worker.name)
    ]
    decisions: list[Decision] = []
    for index in ledger.isolated():
        others = [name for name in idle if len(workers) == 1 or name != ledger.samples[index].faults.worker]
        if others:
            idle.remove(others[0])
            decisions.append(Generate(others[0], (index,)))
    return decisions


def _score(context: JobContext, state: JobState, now: float, facts: DerivedState) -> list[Decision]:
    ledger = state.ledger
    waiting = context.spec.inference.overlap == "Disabled" and not ledger.all_generated
    if waiting or not ledger.unscored():
        return []
    assigned: dict[str, dict[int, list[str]]] = {}
    for tasks, limit, workers in _kinds(context, state, facts):
        load = {worker.name: ledger.scoring_on(worker.name, tasks) for worker in workers}
        for index in _while_room(_longest_first(state), load, limit * len(tasks)):
            sample = ledger.samples[index]
            if now < sample.not_before:
                continue
            for worker, chosen in _places(sample, tasks, load, incremental_dispatch.holder(state, index)).items():
                assigned.setdefault(worker, {}).setdefault(index, []).extend(chosen)
                load[worker] += len(chosen)
    return [Score(worker, chunk) for worker, samples in assigned.items() for chunk in _chunks(samples)]


def _score_groups(context: JobContext, state: JobState, now: float, facts: DerivedState) -> list[Decision]:
    """Return leases of whole-group tasks to the least loaded scorers; a retry goes to another worker if possible."""
    ledger = state.ledger
    waiting = context.spec.inference.overlap == "Disabled" and not ledger.all_generated
    if waiting or not ledger.open_groups():
        return []
    decisions: list[Decision] = []
    load = {worker.name: ledger.scoring_on(worker.name) for worker in (*facts.scorers, *facts.early_scorers)}
    current, trained = {worker.name for worker in facts.scorers}, _trained_tasks(context)
    for group, task in ledger.open_groups():
        members = ledger.members(group)
        if any(now < sample.not_before for sample in members):
            continue
        failed_on = {sample.failed_on.get(task) for sample in members}
        able = [name for name in load if name in current or task not in trained]
        others = [name for name in able if name not in failed_on] or able
        if not others:
            continue
        worker = min(others, key=lambda name: (load[name], name))
        if load[worker] >= SCORES_IN_FLIGHT:
            continue
        load[worker] += len(members)
        decisions.append(ScoreGroup(worker, group, task))
    return decisions


def _kinds(context: JobContext, state: JobState, facts: DerivedState) -> list[_Kind]:
    """Return (tasks that are leased together, most samples per worker, workers that may get them) for each kind."""
    names, everybody = tuple(task.name for task in context.tasks), (*facts.scorers, *facts.early_scorers)
    if not facts.can_score:
        kinds: list[_Kind] = [(names, SCORES_IN_FLIGHT, everybody)]
    else:
        calls = tuple(name for name in names if name in context.calls)
        models = tuple(name for name in names if name not in calls)
        kinds = [(models, _share(state, len(everybody)), everybody), (calls, SCORES_IN_FLIGHT, everybody)]
    if facts.early_scorers:
        trained = _trained_tasks(context)
        late = [(tuple(n for n in kind if n in trained), limit, facts.scorers) for kind, limit, _ in kinds]
        kinds = [(tuple(n for n in kind if n not in trained), limit, who) for kind, limit, who in kinds] + late
    return [kind for kind in kinds if kind[0]]


def _trained_tasks(context: JobContext) -> frozenset[str]:
    """Return the scoring tasks of trained models."""
    return frozenset(task.name for task in context.tasks if task.model in context.scored_models)


def _share(state: JobState, workers: int) -> int:
    """Return the most samples that a worker may have: a share of the unscored ones, within the limits."""
    scored = state.ledger.count(SampleState.SCORED, SampleState.DROPPED)
    everybody = max(workers, len(state.fleet.in_group(Group.GENERATION)) + len(state.fleet.in_group(Group.INFERENCE)))
    share = -(-(len(state.ledger.samples) - scored) // (SHARES * everybody))
    return min(SCORES_IN_FLIGHT, max(MIN_IN_FLIGHT, share))


def _longest_first(state: JobState) -> Collection[int]:
    """Return samples with open tasks, longest response first; above MAX_SORTED, in the order in which they got one."""
    waiting, samples = state.ledger.unscored(), state.ledger.samples
    if len(waiting) > MAX_SORTED:
        return waiting
    return sorted(waiting, key=lambda index: (-len(samples[index].response), index))


def _while_room(samples: Iterable[int], load: dict[str, int], limit: int) -> Iterable[int]:
    for index in samples:
        if not load or min(load.values()) >= limit:
            return
        yield index


def _places(sample: Sample, tasks: Sequence[str], load: dict[str, int], holder: str | None) -> dict[str, list[str]]:
    """Return worker -> open tasks of this sample: the least loaded worker, or, for a failed task, preferably another
    one.
    """
    places: dict[str, list[str]] = {}
    for task in (task for task in tasks if task in sample.open_tasks):
        others = [worker for worker in load if worker != sample.failed_on.get(task)] or list(load)
        idlest = min(others, key=lambda worker: (load[worker], worker))
        near = holder in others and load[holder] <= load[idlest] + incremental_dispatch.LEAD * len(tasks)
        places.setdefault(holder if holder is not None and near else idlest, []).append(task)
    return places


def _chunks(samples: dict[int, list[str]]) -> Iterable[tuple[tuple[int, tuple[str, ...]], ...]]:
    items: Sequence[tuple[int, tuple[str, ...]]] = [(index, tuple(tasks)) for index, tasks in samples.items()]
    for start in range(0, len(items), SCORE_CHUNK):
        yield tuple(items[start : start + SCORE_CHUNK])
