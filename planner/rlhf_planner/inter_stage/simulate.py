"""Simulates an iteration of generation and inference sample by sample, with a threshold and a pool.

Threshold 0, or a pool of all workers, means no fusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhf_planner.inter_stage.costs import StageCosts, Transfer
from rlhf_planner.inter_stage.fitted_costs import Floats
from rlhf_planner.inter_stage.forecast import Forecast, IterationSetup
from rlhf_planner.inter_stage.length_distribution import Ints
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.simulated_generation import SimulatedGeneration, generate
from rlhf_planner.inter_stage.simulated_scoring import SimulatedScoring, score
from rlhf_planner.inter_stage.simulated_tail import (
    ConsolidatedTail,
    ThresholdState,
    consolidate,
    stretched,
    threshold_state,
)
from rlhf_planner.inter_stage.worker_spans import SimulatedIteration, spans_of


def simulate(
    lengths: Sequence[int] | Ints,
    setup: IterationSetup,
    costs: StageCosts,
    threshold: int = 0,
    pool: int | None = None,
    transfer: Transfer = "Auto",
    *,
    model: LengthModel | None = None,
    spans: bool = False,
) -> Forecast:
    """Return the simulated iteration with these response lengths (int64 [batch], tokens).

    The placement of the tail predicts with `model`. Raises ValueError for lengths that do not match the setup, or are
    below 1.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    if len(tokens) != setup.batch:
        raise ValueError(f"lengths has {len(tokens)} samples, the setup {setup.batch}")
    if (tokens < 1).any():
        raise ValueError(f"a response of {int(tokens.min())} tokens: every response has at least 1")
    generation = generate(tokens, setup, costs)
    state = threshold_state(generation, threshold, model, setup.lines) if fuses(threshold, pool, setup) else None
    iteration = simulated_iteration(generation, setup, costs, state, pool or setup.generation_workers, transfer)
    answer = _forecast(generation, setup, iteration, threshold)
    return replace(answer, spans=spans_of(generation, iteration, costs)) if spans else answer


def simulated_iteration(
    generation: SimulatedGeneration,
    setup: IterationSetup,
    costs: StageCosts,
    state: ThresholdState | None,
    pool: int,
    transfer: Transfer,
) -> SimulatedIteration:
    """Return the iteration that follows from a simulated generation and its `state` at the threshold.

    A `state` of None means no fusion.
    """
    tokens = generation.prompts + generation.lengths
    tail = simulated_tail(generation, setup, costs, state, pool, transfer)
    finish = generation.finish if tail is None else tail.finish
    end = float(finish.max())
    released = released_at(end, tail, setup, costs)
    scored = simulated_scores(finish, tokens, end, released, setup, costs)
    return SimulatedIteration(max(end, scored.end), finish, tail, released, scored)


def simulated_tail(
    generation: SimulatedGeneration,
    setup: IterationSetup,
    costs: StageCosts,
    state: ThresholdState | None,
    pool: int,
    transfer: Transfer,
) -> ConsolidatedTail | None:
    """Return the tail on its pool, slowed down by scoring beside it; None without a `state`."""
    tail = None if state is None else consolidate(generation, state, pool, transfer, costs)
    if tail is None or costs.contention_ratio <= 1:
        return tail
    tokens = float((generation.prompts + generation.lengths).sum())
    scorers = setup.generation_workers - len(tail.pool) + setup.inference_workers
    return stretched(tail, costs.backlog_seconds(setup.batch, tokens) / scorers, costs.contention_ratio)


def released_at(
    end: float, tail: ConsolidatedTail | None, setup: IterationSetup, costs: StageCosts
) -> list[float | None]:
    """Return the time from which each generation worker can score; None if it does not. Decoding ends by `end`."""
    if tail is not None:
        return [min(moment, end) + costs.wake_seconds for moment in tail.free]
    return [None if setup.inference_workers else end + costs.wake_seconds] * setup.generation_workers


def simulated_scores(
    finish: Floats,
    tokens: Floats,
    end: float,
    released: Sequence[float | None],
    setup: IterationSetup,
    costs: StageCosts,
) -> SimulatedScoring:
    """Return the scoring of samples that are generated at `finish` float64 [n], all until `end`, and have `tokens`
    float64 [n]."""
    workers = setup.generation_workers
    available = {index: moment for index, moment in enumerate(released) if moment is not None}
    available |= dict.fromkeys(range(workers, workers + setup.inference_workers), 0.0)
    arrivals = finish if setup.overlap else np.full(len(finish), end)
    return score(arrivals, tokens, available, costs)


def fuses(threshold: int, pool: int | None, setup: IterationSetup) -> bool:
    """Return whether this threshold and pool consolidate any samples."""
    return threshold > 0 and pool is not None and pool < setup.generation_workers


def _forecast(
    generation: SimulatedGeneration, setup: IterationSetup, iteration: SimulatedIteration, threshold: int
) -> Forecast:
    tail, end = iteration.tail, float(iteration.finish.max())
    decoding = [timeline.busy for timeline in generation.timelines] if tail is None else tail.busy
    idle = []
    for worker in range(setup.generation_workers + setup.inference_workers):
        busy = iteration.scored.busy.get(worker, 0.0) + (decoding[worker] if worker < len(decoding) else 0.0)
        idle.append(max(0.0, 1 - busy / iteration.seconds) if iteration.seconds > 0 else 0.0)
    moves = [] if tail is None else tail.transits
    return Forecast(
        seconds=iteration.seconds,
        generation_seconds=end,
        scoring_seconds=iteration.seconds - end,
        threshold=0 if tail is None else threshold,
        pool=setup.generation_workers if tail is None else len(tail.pool),
        threshold_seconds=None if tail is None else tail.start,
        moved=len(moves),
        moved_by_kv=sum(move.kv for move in moves),
        moved_bytes=0.0 if tail is None else tail.moved_bytes,
        released=tuple(iteration.released),
        idle=tuple(idle),
        decode_busy=sum(decoding),
        score_busy=sum(iteration.scored.busy.values()),
        finished=tuple(iteration.finish.tolist()),
        transits=tuple(moves),
    )
