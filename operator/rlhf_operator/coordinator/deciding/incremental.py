"""Incremental scoring: which prefixes of unfinished samples go to which worker that scores and has nothing to score.

A worker is given prefixes only while no finished sample waits for a model, a sample's tasks stay on one worker, and
the one with most to do comes first. When a sample is finished its worker is preferred, unless others wait for it there.
Rule: pure; hints only. Whatever is decided here changes when a score is computed, never what it is.
"""

from collections.abc import Sequence
from typing import Final

from rlhf_api.incremental import BLOCK, prefix_tasks, whole_blocks
from rlhf_api.names import Group
from rlhf_operator.coordinator.deciding import weights
from rlhf_operator.coordinator.deciding.decisions import Decision, ScorePrefix
from rlhf_operator.coordinator.world.sample import SampleState
from rlhf_operator.coordinator.world.worker import Worker
from rlhf_operator.coordinator.world.world import Plan, World

IN_FLIGHT: Final = 8
"""Samples a worker is asked for at a time: some share a pass, and what finishes waits for one pass only."""
LEAD: Final = 2
"""Finished samples that its worker may have more than the idlest one and still be given the sample it began."""
UNFINISHED: Final = (SampleState.QUEUED, SampleState.DECODING, SampleState.MIGRATING)


def possible(plan: Plan) -> bool:
    """There is something to score before a sample ends, and it is not forbidden."""
    settings = plan.spec.inference
    return settings.incremental != "Off" and settings.overlap != "Off" and bool(prefix_tasks(plan.tasks))


def on(plan: Plan, world: World) -> bool:
    """Prefixes are scored in this iteration."""
    return possible(plan) and (plan.spec.inference.incremental == "On" or world.prefixes.chosen)


def decide(plan: Plan, world: World, now: float, released: Sequence[Worker]) -> list[Decision]:
    """One command a worker that has nothing else to do. `released`: generation workers that score now."""
    ledger, state = world.ledger, world.prefixes
    if not on(plan, world) or world.trained or world.stop is not None or ledger.all_generated:
        return []
    models = _models(plan)
    if any(_waits(world, index, models, now) for index in ledger.unscored()):
        return []
    loads = state.loads()
    room = {worker.name: IN_FLIGHT for worker in _idle(plan, world, models, released)}
    for item in state.asked.values():
        if item.worker in room:
            room[item.worker] -= 1
    given: dict[str, list[int]] = {}
    for index in _by_work(world) if any(room.values()) else []:
        worker = _place(world, index, room, loads)
        if worker is not None:
            given.setdefault(worker, []).append(index)
            room[worker] -= 1
            loads[worker] += index not in state.held
    return [ScorePrefix(worker, tuple(samples)) for worker, samples in given.items()]


def holder(world: World, index: int) -> str | None:
    """The worker that has begun with this sample."""
    item = world.prefixes.held.get(index)
    return None if item is None else item.worker


def gained(world: World, index: int, tokens: int) -> bool:
    """Tokens came to a sample that had so many before: it has a whole block more."""
    prompt = world.prompt_tokens[index]
    return whole_blocks(prompt + len(world.ledger.samples[index].response)) > whole_blocks(prompt + tokens)


def goal(world: World, index: int) -> int:
    """Tokens of a sample, prompt included, that can be scored now."""
    return whole_blocks(world.prompt_tokens[index] + len(world.ledger.samples[index].response)) * BLOCK


def _models(plan: Plan) -> frozenset[str]:
    """Scoring tasks that keep a worker's device busy: all but rewards by calls."""
    by_call = plan.spec.models.reward.model is None
    return frozenset(task.name for task in plan.tasks if not (by_call and task.model == "reward"))


def _waits(world: World, index: int, models: frozenset[str], now: float) -> bool:
    sample = world.ledger.samples[index]
    return now >= sample.not_before and not models.isdisjoint(sample.open_tasks)


def _idle(plan: Plan, world: World, models: frozenset[str], released: Sequence[Worker]) -> list[Worker]:
    return [
        worker
        for worker in (*world.fleet.of(Group.INFERENCE), *released)
        if weights.current(plan, world, worker, Group.INFERENCE) and not world.ledger.scoring_on(worker.name, models)
    ]


def _by_work(world: World) -> list[int]:
    """Unfinished samples that have a whole block to score, those with most of them first."""
    state, samples = world.prefixes, world.ledger.samples
    work = []
    for sample in samples:
        if sample.state in UNFINISHED and len(sample.response) and sample.index not in state.asked:
            held = state.held.get(sample.index)
            left = goal(world, sample.index) - (0 if held is None else held.tokens)
            if left >= BLOCK:
                work.append((-left, sample.index))
    return [index for _, index in sorted(work)]


def _place(world: World, index: int, room: dict[str, int], loads: dict[str, int]) -> str | None:
    held, full = world.prefixes.held.get(index), world.prefixes.full
    if held is not None:
        return held.worker if room.get(held.worker) else None
    free = [name for name, left in room.items() if left and loads[name] < full.get(name, loads[name] + 1)]
    return min(free, key=lambda name: (loads[name], name), default=None)
