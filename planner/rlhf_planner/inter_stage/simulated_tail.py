"""Simulates the tail of an iteration: unfinished samples at the threshold, their moves, and their decoding in the pool.

Simplified: samples that move to one worker join together, when the last of them arrives. A link carries one KV cache at
a time, at either end. MOVES_AT_ONCE moves share their other waiting times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rlhf_planner.inter_stage.costs import MOVES_AT_ONCE, Flags, StageCosts, Transfer
from rlhf_planner.inter_stage.fitted_costs import Floats
from rlhf_planner.inter_stage.forecast import Transit
from rlhf_planner.inter_stage.length_distribution import Ints
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.simulated_generation import SimulatedGeneration, drain
from rlhf_planner.inter_stage.tail_placement import UnfinishedColumns, assign


class ThresholdState(NamedTuple):
    """Samples in decoding or waiting when the threshold is reached."""

    start: float
    samples: Ints
    """[k] sample numbers."""
    unfinished: UnfinishedColumns
    limit: int
    """Maximum tokens of a response."""


class Piece(NamedTuple):
    """Decoding of a pool worker after samples have joined it."""

    worker: int
    join: float
    start: float
    """Time after the prefill of samples that came without a cache."""
    end: float
    rows: int


class ConsolidatedTail(NamedTuple):
    """Decoding of the tail on the workers of the pool."""

    start: float
    pool: list[int]
    finish: Floats
    """[n] seconds until each sample of the iteration is finished."""
    free: list[float]
    """Time at which each worker has nothing left to decode."""
    busy: list[float]
    """Seconds of decoding and prefilling of each worker."""
    transits: list[Transit]
    moved_bytes: float
    pieces: list[Piece]


def threshold_state(
    generation: SimulatedGeneration, threshold: int, model: LengthModel | None, lines: Sequence[int] = ()
) -> ThresholdState:
    """Return the state at the threshold. Without a `model` all samples look alike. `lines` is as in IterationSetup."""
    start = generation.threshold_time(threshold)
    samples = np.flatnonzero(generation.finish > start)
    steps = np.array([timeline.steps_at(start) for timeline in generation.timelines])
    worker = generation.worker[samples]
    tokens = _decoded(generation, samples, steps[worker])
    prompt = generation.prompts[samples].astype(np.int64)
    sample_lines = np.asarray(lines, dtype=np.int64)[samples] if len(lines) else lines
    remaining = np.ones(len(samples)) if model is None else model.remaining_each(tokens, prompt, sample_lines)
    limit = int(generation.lengths.max()) if model is None else model.max_tokens
    return ThresholdState(start, samples, UnfinishedColumns(worker, prompt, tokens, remaining), limit)


def consolidate(
    generation: SimulatedGeneration, state: ThresholdState, pool: int, transfer: Transfer, costs: StageCosts
) -> ConsolidatedTail:
    """Simulate the tail on `pool` workers, or on more if they cannot hold it."""
    workers = len(generation.timelines)
    unfinished, start = state.unfinished, state.start
    stays, moving, destination, kv = assign(unfinished, workers, pool, costs, state.limit, transfer)
    transits = _transits(state, moving, destination, kv, costs)
    finish = generation.finish.copy()
    free = [max(start, timeline.busy) for timeline in generation.timelines]
    busy = [timeline.busy for timeline in generation.timelines]
    for worker in set(range(workers)).difference(stays):
        free[worker] = start
    for move in transits:
        free[move.source] = max(free[move.source], move.end)
    for worker in set(range(workers)).difference(stays):
        busy[worker] = min(busy[worker], free[worker])
    pieces = []
    for worker, arriving in _grouped(zip(destination.tolist(), range(len(transits)), strict=True)):
        piece = _join(generation, state, moving[arriving], [transits[at] for at in arriving], costs, finish)
        free[worker] = piece.end
        busy[worker] = min(busy[worker], piece.join) + piece.end - piece.join
        pieces.append(piece)
    moved_bytes = costs.kv_bytes_per_token * float((unfinished.prompt + unfinished.tokens)[moving][kv].sum())
    return ConsolidatedTail(start, stays, finish, free, busy, transits, moved_bytes, pieces)


def stretched(tail: ConsolidatedTail, scoring: float, times: float) -> ConsolidatedTail:
    """Return the tail if decoding takes `times` as long during the first `scoring` seconds, while released workers
    score."""

    def more(moments: float | Floats) -> Floats:
        return np.asarray(np.minimum(np.maximum(moments - tail.start, 0.0) * (times - 1), scoring * (1 - 1 / times)))

    def later(moment: float) -> float:
        return float(moment + more(moment))

    free, busy = list(tail.free), list(tail.busy)
    for worker in tail.pool:
        free[worker] = later(tail.free[worker])
        busy[worker] += free[worker] - tail.free[worker]
    pieces = [
        piece._replace(join=later(piece.join), start=later(piece.start), end=later(piece.end)) for piece in tail.pieces
    ]
    return tail._replace(finish=tail.finish + more(tail.finish), free=free, busy=busy, pieces=pieces)


def _decoded(generation: SimulatedGeneration, samples: Ints, steps: Floats) -> Ints:
    """Return [k] tokens of each sample after its worker has made `steps` steps; the last token never counts."""
    done = np.floor(steps + 1e-9).astype(np.int64) - generation.begun[samples]
    answer: Ints = np.minimum(np.maximum(done, 0), generation.lengths[samples] - 1)
    return answer


def _grouped(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    groups: dict[int, list[int]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return sorted(groups.items())


def _transits(state: ThresholdState, moving: Ints, destination: Ints, kv: Flags, costs: StageCosts) -> list[Transit]:
    acknowledged = state.start + costs.acknowledged_seconds
    keys = (state.unfinished.prompt + state.unfinished.tokens)[moving].tolist()
    sources, samples = state.unfinished.worker[moving].tolist(), state.samples[moving].tolist()
    sending: dict[int, float] = {}
    receiving: dict[int, float] = {}
    begun: dict[int, int] = {}
    answer = []
    for at, (to, by_kv) in enumerate(zip(destination.tolist(), kv.tolist(), strict=True)):
        source, end = sources[at], acknowledged
        if by_kv:
            sent = (
                max(sending.get(source, acknowledged), receiving.get(to, acknowledged)) + keys[at] * costs.link_seconds
            )
            sending[source] = receiving[to] = sent
            end = sent + (1 + begun.get(source, 0) // MOVES_AT_ONCE) * costs.move_seconds
            begun[source] = begun.get(source, 0) + 1
        answer.append(Transit(samples[at], source, to, by_kv, state.start, end))
    return answer


def _join(
    generation: SimulatedGeneration,
    state: ThresholdState,
    moving: Ints,
    arriving: Sequence[Transit],
    costs: StageCosts,
    finish: Floats,
) -> Piece:
    """Write the finish times of all samples that a pool worker decodes once `arriving` have arrived; return its
    decoding."""
    worker = arriving[0].destination
    moment, steps = generation.timelines[worker].boundary(max(move.end for move in arriving))
    own = np.flatnonzero((generation.worker == worker) & (generation.finish > moment + 1e-12))
    kv = np.array([move.kv for move in arriving], dtype=np.bool_)
    came, bare = state.samples[moving[kv]], state.samples[moving[~kv]]
    came = came[generation.finish[came] > moment]  # the others finished at their source before their turn
    source_steps = {
        index: generation.timelines[index].steps_at(moment) for index in set(generation.worker[came].tolist())
    }
    there = np.array([source_steps[index] for index in generation.worker[came].tolist()])
    bare_tokens = state.unfinished.tokens[moving[~kv]]
    join = moment
    if len(bare):
        built = generation.prompts[bare] + (0 if costs.replays else bare_tokens)
        moment += costs.resume_seconds(len(bare), float(built.mean()))
    if costs.replays:
        bare_tokens = np.zeros_like(bare_tokens)
    rows = np.concatenate([own, came, bare])
    if not len(rows):
        return Piece(worker, join, moment, moment, 0)
    decoded_by_own = _decoded(generation, own, np.full(len(own), float(steps)))
    done = np.concatenate([decoded_by_own, _decoded(generation, came, there), bare_tokens])
    ends = drain(moment, generation.lengths[rows] - done, generation.prompts[rows] + done, costs)
    finish[rows] = ends.finish
    return Piece(worker, join, moment, float(ends.times[-1]), len(rows))
