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
from rlhf_coordinator.scheduling import release, weights
from rlhf_coordinator.scheduling.decisions import AdoptCosts, Decision, MeasureCosts, Migrate, Offload, Withdraw
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.state.worker import CommandKind, Worker
from rlhf_planner.inter_stage.tail_placement import Move

MEASURED: Final = (Group.GENERATION, Group.INFERENCE)
"""Roles whose costs are measured, in this order."""


def decide(context: JobContext, state: JobState, moves: Iterable[Move], released: Sequence[Worker]) -> list[Decision]:
    """Moves what has to move, parks scoring models that have nothing to score, measures what is not known."""
    if state.stop is not None:
        return []
    return [
        *_move(state, moves),
        *_offload(context, state, {worker.name for worker in released}),
        *_measure(context, state),
    ]


def _move(state: JobState, moves: Iterable[Move]) -> list[Decision]:
    """One command a source (tokens) or a source and destination (KV)."""
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


def _offload(context: JobContext, state: JobState, released: Collection[str]) -> list[Decision]:
    """Device memory belongs to decoding again once the next iteration's policy is there."""
    return [
        Offload(worker.name, Group.INFERENCE)
        for worker in state.fleet.of(Group.GENERATION)
        if worker.scorer_onloaded
        and worker.device.startswith("cuda")
        and worker.name not in released
        and weights.current(context, state, worker, Group.GENERATION)
        and Group.INFERENCE in worker.roles
        and not state.ledger.scoring_on(worker.name)
    ]


def _measure(context: JobContext, state: JobState) -> list[Decision]:
    """Every generation worker that is ready measures each role once; one that still starts is not waited for."""
    if not release.measuring(context, state):
        return []
    decisions: list[Decision] = []
    ready = release.decoders(context, state)
    for worker in ready:
        missing = [role for role in MEASURED if (worker.name, role.value) not in state.fusion.results]
        if missing:
            decisions.append(MeasureCosts(worker.name, missing[0]))
    asked = [item for worker in state.fleet.of(Group.GENERATION) for item in worker.pending.values()]
    under_way = any(item.kind is CommandKind.MEASURE for item in asked)
    return decisions or ([AdoptCosts()] if ready and not under_way else [])
