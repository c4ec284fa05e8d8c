"""Consolidation of the long tail: when the last samples go to few workers, where they go, and which workers then score.

A *released* generation worker has no samples to decode, and may score (`_released`). Rule: pure.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rlhf_common.names import Group
from rlhf_coordinator.scheduling.balancing import reallocations, staying_samples, unfinished_sample
from rlhf_coordinator.scheduling.decisions import (
    AdoptCosts,
    Decision,
    MeasureCosts,
    Migrate,
    NoteReallocation,
    Offload,
    Withdraw,
)
from rlhf_coordinator.scheduling.readiness import free_to_score
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.state.worker import CommandKind, Worker
from rlhf_planner.inter_stage.balance import Reallocation
from rlhf_planner.inter_stage.tail_placement import Move, TailPlacement, place_tail

MEASURED: Final = (Group.GENERATION, Group.INFERENCE)
"""Roles whose costs are measured, in this order."""


@dataclass(frozen=True)
class Consolidation:
    """The current state of the iteration's tail."""

    possible: bool = False
    """Whether the tail may consolidate (`fusion_possible`)."""
    planned: bool = False
    """Whether the choice for this iteration is that its tail goes to fewer workers than there are."""
    begun: bool = False
    """Whether a consolidation is planned, and so few samples are unfinished that they belong in the pool."""
    pool: tuple[str, ...] = ()
    """Names of the workers in the migration pool, which decode the tail; empty before it consolidates."""
    moves: tuple[Move, ...] = ()
    """Moves into the pool, or, before it exists, moves that balance the workers."""
    released: tuple[str, ...] = ()
    """Generation workers that score now, by index."""
    reallocations: tuple[Reallocation, ...] = ()
    """Balancing moves with their predicted gains."""


NO_CONSOLIDATION: Final = Consolidation()
"""State of the tail before the first decision."""


# ---------------------------------------------------------------- when and where


def fusion_possible(context: JobContext, state: JobState) -> bool:
    """Return whether the tail may consolidate: fusion is on, and several workers generate while others may score."""
    several = state.fleet.sizes.get(Group.GENERATION, 0) > 1
    overlaps = context.spec.inference.overlap != "Disabled"
    wanted = context.spec.fusion.inter_stage.mode != "Disabled" and not state.fusion.given_up
    return wanted and several and overlaps and bool(context.tasks)


def generation_can_score(context: JobContext, state: JobState, possible: bool) -> bool:
    """Return whether generation workers also have the scoring models.

    There must be scoring tasks, and no inference workers or a `possible` consolidation.
    """
    return bool(context.tasks) and (not state.fleet.sizes.get(Group.INFERENCE, 0) or possible)


def consolidate(
    context: JobContext, state: JobState, now: float, ready: Sequence[Worker], can_score: bool
) -> Consolidation:
    """Return the state of the tail. `ready`: the workers that can decode; `can_score`: they can score too."""
    choice = state.fusion.choice
    possible = fusion_possible(context, state)
    planned = possible and bool(choice.threshold) and choice.pool < state.fleet.sizes[Group.GENERATION]
    room = choice.pool * context.spec.generation.max_batch_size
    begun = planned and 0 < state.ledger.unfinished <= min(choice.threshold, room)
    if begun:
        pool, moves = _place(state, ready)
        balanced: tuple[Reallocation, ...] = ()
    else:
        balanced = reallocations(context, state, now, ready) if possible else ()
        pool, moves = (), tuple(move for together in balanced for move in together.moves)
    released = _released(context, state, planned, pool) if can_score else ()
    return Consolidation(possible, planned, begun, pool, moves, released, balanced)


def _place(state: JobState, ready: Sequence[Worker]) -> TailPlacement:
    """Return the workers that decode the tail, and the moves to them.

    A sample that already leaves a worker does not count as its own.
    """
    ledger, choice, fusion = state.ledger, state.fusion.choice, state.fusion
    names = [worker.name for worker in ready]
    staying = {name: staying_samples(state, name) if ledger.decoding_on(name) else [] for name in names}
    holders = [name for name in names if staying[name] or ledger.arriving_on(name)]
    if len(holders) <= choice.pool:
        placed = sum(len(staying[name]) + ledger.arriving_on(name) for name in holders)
        spare = sorted(set(names) - set(holders), key=lambda name: (ledger.scoring_on(name), name))
        more = spare[: choice.pool - len(holders)] if placed < ledger.unfinished else []
        return TailPlacement(tuple(sorted([*holders, *more])), ())
    unfinished = {
        name: [unfinished_sample(state, i) for i in (*staying[name], *ledger.bound_for(name))] for name in names
    }
    return place_tail(unfinished, choice.pool, fusion.costs, fusion.lengths, choice.transfer)


def _released(context: JobContext, state: JobState, planned: bool, pool: Collection[str]) -> tuple[str, ...]:
    """Return the generation workers that score now, by index."""
    if state.trained:
        return ()
    scores_at_the_end = planned or not state.fleet.sizes.get(Group.INFERENCE, 0)
    if not (scores_at_the_end if state.ledger.all_generated else pool):
        return ()
    return tuple(worker.name for worker in free_to_score(context, state, pool))


# ---------------------------------------------------------------- what follows


def decide(state: JobState, consolidation: Consolidation, ready: Sequence[Worker], measures: bool) -> list[Decision]:
    """Return the decisions that move samples, offload idle scoring models, and measure costs."""
    if state.stop is not None:
        return []
    return [
        *map(NoteReallocation, consolidation.reallocations),
        *_move(state, consolidation.moves),
        *_offload(state, ready, consolidation.released),
        *(_measure(state, ready) if measures else ()),
    ]


def _move(state: JobState, moves: Iterable[Move]) -> list[Decision]:
    """Return one command per source (tokens), and one per source and destination (KV cache)."""
    by_cache: dict[tuple[str, str], list[int]] = defaultdict(list)
    by_tokens: dict[str, list[int]] = defaultdict(list)
    for move in moves:
        sample = state.ledger.samples[move.sample]
        if sample.state is not SampleState.DECODING:
            continue
        if move.kv and not sample.immovable and state.fleet.workers[move.destination].address:
            by_cache[move.source, move.destination].append(move.sample)
        else:
            by_tokens[move.source].append(move.sample)
    migrations = [Migrate(*pair, tuple(samples)) for pair, samples in by_cache.items()]
    return [*migrations, *(Withdraw(source, tuple(samples)) for source, samples in by_tokens.items())]


def _offload(state: JobState, ready: Sequence[Worker], released: Collection[str]) -> list[Decision]:
    """Return commands that offload the scoring models of ready CUDA workers that are not released and score nothing."""
    return [
        Offload(worker.name, Group.INFERENCE)
        for worker in ready
        if worker.scorer_onloaded
        and worker.device.startswith("cuda")
        and worker.name not in released
        and Group.INFERENCE in worker.roles
        and not state.ledger.scoring_on(worker.name)
    ]


def measures_costs(context: JobContext, state: JobState, possible: bool) -> bool:
    """Return whether to measure costs now: they are wanted and unknown, and no sample is being decoded.

    Nothing is measured once all responses are finished.
    """
    fusion = state.fusion
    if fusion.measured or context.spec.fusion.inter_stage.mode != "Auto" or state.stop is not None or state.trained:
        return False
    busy = state.ledger.count(SampleState.DECODING, SampleState.MIGRATING) or state.ledger.all_generated
    return possible and not busy


def _measure(state: JobState, ready: Sequence[Worker]) -> list[Decision]:
    """Return a measurement for each ready worker that lacks one, one role at a time, and then the adoption of costs."""
    decisions: list[Decision] = []
    for worker in ready:
        missing = [role for role in MEASURED if (worker.name, role.value) not in state.fusion.results]
        if missing:
            decisions.append(MeasureCosts(worker.name, missing[0]))
    pending = [item for worker in state.fleet.in_group(Group.GENERATION) for item in worker.pending.values()]
    under_way = any(item.kind is CommandKind.MEASURE for item in pending)
    return decisions or ([AdoptCosts()] if ready and not under_way else [])
