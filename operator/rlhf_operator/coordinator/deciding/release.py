"""Which generation workers score, and which keep the tail: functions of the ledger, the choice and the fleet alone.

A generation worker that may score holds the scoring models beside the policy. It is *released* when it has nothing left
to decode and will get nothing: outside the pool once the tail gathers, in the pool once nothing is queued, and all of
them when every response is finished. Without fusion that last rule is the only one, and only where there are no
inference workers. Released workers and inference workers share one queue.
Rule: pure; nothing is remembered, so a lost worker or a restarted coordinator finds the same answer or a better one.
"""

from collections.abc import Collection
from typing import Final

from rlhf_api.names import Group
from rlhf_operator.coordinator.deciding import weights
from rlhf_operator.coordinator.world.sample import SampleState
from rlhf_operator.coordinator.world.worker import Work, Worker
from rlhf_operator.coordinator.world.world import Plan, World
from rlhf_planner.inter_stage.balance import balance
from rlhf_planner.inter_stage.place import Move, Placement, Unfinished, place

SPREAD: Final = 1.5
"""The fullest worker has this many times the samples of the emptiest, or nothing is balanced."""
REST_SECONDS: Final = 2.0
"""A worker that gave or took samples is left alone for so long: what it was predicted to gain shows first."""


def possible(plan: Plan, world: World) -> bool:
    """Inter-stage fusion may be chosen: there is somebody to release, and something that can begin before the end."""
    several = world.fleet.sizes[Group.GENERATION] > 1
    overlaps = plan.spec.inference.overlap != "Off"
    wanted = plan.spec.fusion.inter_stage.mode != "Off" and not world.fusion.given_up
    return wanted and several and overlaps and bool(plan.tasks)


def doubles(plan: Plan, world: World) -> bool:
    """Generation workers hold the scoring models too."""
    alone = not world.fleet.sizes.get(Group.INFERENCE, 0)
    return bool(plan.tasks) and (alone or possible(plan, world))


def measuring(plan: Plan, world: World) -> bool:
    """The costs of work are wanted, not known, and nothing is decoded that would be held up: they are measured now."""
    state = world.fusion
    if state.measured or plan.spec.fusion.inter_stage.mode != "Auto" or world.stop is not None or world.trained:
        return False
    busy = world.ledger.count(SampleState.DECODING, SampleState.MIGRATING) or world.ledger.all_generated
    return possible(plan, world) and not busy


def fuses(plan: Plan, world: World) -> bool:
    """The tail of this iteration is to gather on fewer workers than there are."""
    choice = world.fusion.choice
    return bool(choice.threshold) and choice.pool < world.fleet.sizes[Group.GENERATION] and possible(plan, world)


def gathering(plan: Plan, world: World) -> bool:
    """So few samples are unfinished that they belong on the pool. What is queued then fits there too."""
    choice = world.fusion.choice
    if not fuses(plan, world):
        return False
    room = choice.pool * plan.spec.generation.max_batch_size
    return 0 < world.ledger.unfinished <= min(choice.threshold, room)


def decoders(plan: Plan, world: World) -> list[Worker]:
    """Generation workers that can be given samples now, by index."""
    both = doubles(plan, world)
    return [
        worker
        for worker in world.fleet.of(Group.GENERATION)
        if weights.current(plan, world, worker, Group.GENERATION) and (not both or Group.INFERENCE in worker.roles)
    ]


def placement(plan: Plan, world: World) -> Placement:
    """Once the tail gathers: who keeps it, and what has to move there. What leaves a worker already is not its own."""
    ledger, choice, state = world.ledger, world.fusion.choice, world.fusion
    ready = [worker.name for worker in decoders(plan, world)]
    kept = {name: _kept(world, name) if ledger.decoding_on(name) else [] for name in ready}
    holders = [name for name in ready if kept[name] or ledger.arriving_on(name)]
    if len(holders) <= choice.pool:
        settled = sum(len(kept[name]) + ledger.arriving_on(name) for name in holders)
        spare = sorted(set(ready) - set(holders), key=lambda name: (ledger.scoring_on(name), name))
        more = spare[: choice.pool - len(holders)] if settled < ledger.unfinished else []
        return Placement(tuple(sorted([*holders, *more])), ())
    held = {name: [unfinished(world, index) for index in (*kept[name], *ledger.bound_for(name))] for name in ready}
    return place(held, choice.pool, state.costs, state.lengths, choice.transfer)


def balancing(plan: Plan, world: World, now: float) -> tuple[Move, ...]:
    """Before the threshold, once nothing is queued: from the worker that would be last to one that would run dry."""
    ledger, state, settings = world.ledger, world.fusion, plan.spec.fusion.inter_stage
    if settings.balance == "Off" or not state.measured or now < state.look_again or not possible(plan, world):
        return ()
    if ledger.count(SampleState.QUEUED, SampleState.MIGRATING) or ledger.all_generated:
        return ()
    held = {worker.name: _kept(world, worker.name) for worker in decoders(plan, world)}
    counts = [len(samples) for samples in held.values()]
    if len(counts) < 2 or max(counts) < 2 or max(counts) < SPREAD * min(counts):
        return ()
    resting = {name for name, moment in state.moved_at.items() if now - moment < REST_SECONDS}
    samples = {name: [unfinished(world, index) for index in indices] for name, indices in held.items()}
    return balance(samples, state.costs, state.lengths, settings.transfer, resting)


def unfinished(world: World, index: int) -> Unfinished:
    """A sample as the planner sees it."""
    tokens = len(world.ledger.samples[index].response)
    return Unfinished(index, world.prompt_tokens[index], tokens, world.prompt_lines[index])


def _kept(world: World, name: str) -> list[int]:
    """Samples it decodes and was not asked to give away."""
    samples = world.ledger.samples
    return [index for index in world.ledger.held_by(name) if samples[index].state is SampleState.DECODING]


def released(plan: Plan, world: World, pool: Collection[str]) -> list[Worker]:
    """Generation workers that score now; `pool`: the workers that keep the tail, none when it does not gather."""
    ledger = world.ledger
    if world.trained or not doubles(plan, world):
        return []
    alone = not world.fleet.sizes.get(Group.INFERENCE, 0)
    if ledger.all_generated:
        if not alone and not fuses(plan, world):
            return []
    elif not pool:
        return []
    loose = ledger.count(SampleState.QUEUED, SampleState.MIGRATING) > 0
    return [
        worker
        for worker in decoders_and_scorers(plan, world)
        if not (ledger.decoding_on(worker.name) or ledger.arriving_on(worker.name))
        and not (loose and worker.name in pool)
    ]


def decoders_and_scorers(plan: Plan, world: World) -> list[Worker]:
    """Generation workers with both roles and the iteration's policy; one that loads a scoring model counts too."""
    return [
        worker
        for worker in world.fleet.of(Group.GENERATION)
        if worker.connected
        and worker.roles >= {Group.GENERATION, Group.INFERENCE}
        and worker.versions.get(weights.ACTOR) == world.version
        and (worker.slow is None or worker.slow.work is Work.LOAD)
    ]
