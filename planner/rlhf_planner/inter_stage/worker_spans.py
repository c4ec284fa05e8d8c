"""Lists the activities of every worker as time spans, for pictures.

Rule: derived from the simulated times of decoding; decides nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import Floats
from rlhf_planner.inter_stage.forecast import WorkerSpan
from rlhf_planner.inter_stage.simulated_generation import SimulatedGeneration, WorkerTimeline
from rlhf_planner.inter_stage.simulated_scoring import SimulatedScoring
from rlhf_planner.inter_stage.simulated_tail import ConsolidatedTail


class SimulatedIteration(NamedTuple):
    """A simulated iteration of generation and inference. Times are seconds from its start."""

    seconds: float
    finish: Floats
    """[n] time at which each sample is generated."""
    tail: ConsolidatedTail | None
    released: list[float | None]
    scored: SimulatedScoring


def spans_of(
    generation: SimulatedGeneration, iteration: SimulatedIteration, costs: StageCosts
) -> tuple[WorkerSpan, ...]:
    """Return the spans of all workers: prefills, decoding at one batch size, wakes and scoring passes."""
    answer: list[WorkerSpan] = []
    stays: list[list[tuple[float, float]]] = [[] for _ in generation.timelines]
    for worker, start, end in _stays(generation, iteration):
        stays[worker].append((start, end))
    joins = {} if iteration.tail is None else {piece.worker: piece for piece in iteration.tail.pieces}
    for worker, timeline in enumerate(generation.timelines):
        stalls = list(_prefills(timeline))
        if worker in joins:
            piece = joins[worker]
            stalls = [*(stall for stall in stalls if stall[1] <= piece.join), (piece.join, piece.start)]
        answer += [WorkerSpan(worker, "prefill", start, end, 0) for start, end in stalls if end > start]
        answer += [WorkerSpan(worker, "decode", a, b, n) for a, b, n in _between(_stretches(stays[worker]), stalls)]
        free = iteration.released[worker]
        if free is not None and costs.wake_seconds > 0 and iteration.scored.busy.get(worker):
            answer.append(WorkerSpan(worker, "wake", free - costs.wake_seconds, free, 0))
    answer += [
        WorkerSpan(worker, "score", start, end, samples) for worker, start, end, samples in iteration.scored.passes
    ]
    return tuple(answer)


def _stays(generation: SimulatedGeneration, iteration: SimulatedIteration) -> Iterator[tuple[int, float, float]]:
    """Yield (worker, start, end) for each interval in which a sample is decoded on one worker."""
    moves = {} if iteration.tail is None else {move.sample: move for move in iteration.tail.transits}
    pieces = {} if iteration.tail is None else {piece.worker: piece for piece in iteration.tail.pieces}
    finish = iteration.finish.tolist()
    for sample, worker in enumerate(generation.worker.tolist()):
        timeline = generation.timelines[worker]
        begun = timeline.times[bisect_right(timeline.steps, int(generation.begun[sample])) - 1]
        move = moves.get(sample)
        if move is not None:
            left = min(finish[sample], move.end if move.kv else move.start)
            yield worker, begun, left
            if finish[sample] > left:
                yield move.destination, pieces[move.destination].start, finish[sample]
        elif worker in pieces and finish[sample] > pieces[worker].start > pieces[worker].join:
            yield worker, begun, pieces[worker].join
            yield worker, pieces[worker].start, finish[sample]
        else:
            yield worker, begun, finish[sample]


def _prefills(timeline: WorkerTimeline) -> Iterator[tuple[float, float]]:
    points = zip(timeline.times, timeline.steps, strict=True)
    for (start, step), (end, after) in pairwise(points):
        if after == step and end > start:
            yield start, end


def _between(
    stretches: Iterable[tuple[float, float, int]], stalls: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float, int]]:
    """Yield the intervals without the time in which their worker prefills."""
    for start, end, rows in stretches:
        since = start
        for begin, until in stalls:
            if begin < end and until > since:
                if begin > since:
                    yield since, begin, rows
                since = max(since, until)
        if end > since:
            yield since, end, rows


def _stretches(stays: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float, int]]:
    """Yield (start, end, rows) for intervals with a constant number of rows above 0."""
    change: dict[float, int] = {}
    for start, end in stays:
        if end > start:
            change[start] = change.get(start, 0) + 1
            change[end] = change.get(end, 0) - 1
    rows, since = 0, 0.0
    for moment, by in sorted(change.items()):
        if rows > 0 and moment > since:
            yield since, moment, rows
        rows, since = rows + by, moment
