"""The tail of generation: which samples move, to whom, with what; and who measures and rests for it.

Once so few samples are unfinished that they gather, every sample outside the pool is moved there: with its KV cache by
a Migrate to the worker that has it, or by its tokens through a Withdraw, after which it is queued and dispatched to the
pool. A sample that could not be moved with its cache goes by its tokens the next time.
Rule: pure and level-triggered: a sample that moves is on its way in the ledger, so deciding again asks nothing more.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from rlhf_api.names import Group
from rlhf_operator.coordinator.deciding import release, weights
from rlhf_operator.coordinator.deciding.decisions import Decision, MeasureWork, Migrate, Park, TakeCosts, Withdraw
from rlhf_operator.coordinator.world.sample import SampleState
from rlhf_operator.coordinator.world.worker import Work, Worker
from rlhf_operator.coordinator.world.world import Plan, World
from rlhf_planner.inter_stage.place import Move

MEASURED: Final = (Group.GENERATION, Group.INFERENCE)
"""Roles whose costs are measured, in this order."""


def decide(plan: Plan, world: World, moves: Iterable[Move], released: Sequence[Worker]) -> list[Decision]:
    """Moves what has to move, parks scoring models that have nothing to score, measures what is not known."""
    if world.stop is not None:
        return []
    return [*_move(world, moves), *_park(plan, world, {worker.name for worker in released}), *_measure(plan, world)]


def _move(world: World, moves: Iterable[Move]) -> list[Decision]:
    """One command a source (tokens) or a source and destination (KV)."""
    by_cache: dict[tuple[str, str], list[int]] = defaultdict(list)
    by_tokens: dict[str, list[int]] = defaultdict(list)
    for move in moves:
        sample = world.ledger.samples[move.sample]
        if sample.state is not SampleState.DECODING:
            continue
        if move.kv and not sample.immovable and world.fleet.workers[move.destination].address:
            by_cache[move.source, move.destination].append(move.sample)
        else:
            by_tokens[move.source].append(move.sample)
    migrations = [Migrate(*pair, tuple(samples)) for pair, samples in by_cache.items()]
    return [*migrations, *(Withdraw(source, tuple(samples)) for source, samples in by_tokens.items())]


def _park(plan: Plan, world: World, released: Collection[str]) -> list[Decision]:
    """Device memory belongs to decoding again once the next iteration's policy is there."""
    return [
        Park(worker.name, Group.INFERENCE)
        for worker in world.fleet.of(Group.GENERATION)
        if worker.awake
        and worker.device.startswith("cuda")
        and worker.name not in released
        and weights.current(plan, world, worker, Group.GENERATION)
        and Group.INFERENCE in worker.roles
        and not world.ledger.scoring_on(worker.name)
    ]


def _measure(plan: Plan, world: World) -> list[Decision]:
    """Every generation worker that is ready measures each role once; one that still starts is not waited for."""
    if not release.measuring(plan, world):
        return []
    decisions: list[Decision] = []
    ready = release.decoders(plan, world)
    for worker in ready:
        missing = [role for role in MEASURED if (worker.name, role.value) not in world.fusion.results]
        if missing:
            decisions.append(MeasureWork(worker.name, missing[0]))
    asked = [item for worker in world.fleet.of(Group.GENERATION) for item in worker.pending.values()]
    under_way = any(item.work is Work.MEASURE for item in asked)
    return decisions or ([TakeCosts()] if ready and not under_way else [])
