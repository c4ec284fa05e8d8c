"""Chooses moves of samples before the threshold, from the worker that would finish last to the one that would finish
first.

Must never move a sample twice in one result, nor exceed the rows and KV memory of a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from rlhf_planner.inter_stage.costs import StageCosts, Transfer
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.tail_placement import Move, TailSample
from rlhf_planner.inter_stage.throughput import EVEN_PACE, ThroughputCurve, WorkerPace

MIN_GAIN: Final = 0.05
"""Minimum gain, as a share of the later predicted finish."""
MAX_MOVES: Final = 8
"""Maximum moves in one result."""
CANDIDATES: Final = 8
"""Maximum samples that are tried for each move: the longest by expected remaining tokens, and others at even distances.
"""


class Reallocation(NamedTuple):
    """Samples that move together from one worker to another, and the predicted gain."""

    moves: tuple[Move, ...]
    before: float
    """Tokens per second of both workers together, before the move."""
    after: float
    """Tokens per second of both workers together, after the move."""
    gain_seconds: float
    """Seconds by which the later of the two finishes earlier, minus the cost of the moves."""


Lacking = Callable[[str, TailSample], float]
"""(worker, sample) -> seconds until the worker has the tokens of the sample's siblings, from which drafts are made."""


def lacks_nothing(_worker: str, _sample: TailSample) -> float:
    """Return 0: every worker has the tokens of all siblings, or drafts do not use them."""
    return 0.0


class _Question(NamedTuple):
    """Inputs that are the same for all pairs of workers."""

    costs: StageCosts
    limit: int
    """Maximum tokens of a response."""
    transfer: Transfer
    lacking: Lacking


class _Load:
    """Remaining work of one worker."""

    def __init__(self, name: str, samples: Sequence[TailSample], left: Sequence[float], curve: ThroughputCurve) -> None:
        self.name, self.curve = name, curve
        self.samples = {sample.sample: (sample, tokens) for sample, tokens in zip(samples, left, strict=True)}

    def left(self, without: Collection[int] = ()) -> list[float]:
        """Return the expected remaining tokens of its samples, except those in `without`."""
        return [tokens for sample, (_, tokens) in self.samples.items() if sample not in without]

    def finish(self) -> float:
        """Return the seconds until all its samples are finished."""
        return self.curve.finish(self.left())

    @property
    def rate(self) -> float:
        """Throughput in tokens per second."""
        return self.curve.tokens_per_second(len(self.samples))

    def movable(self, moved: Collection[int]) -> list[tuple[TailSample, float]]:
        """Return (sample, expected remaining tokens) of the samples that have not moved yet, the longest first."""
        free = [pair for sample, pair in sorted(self.samples.items()) if sample not in moved]
        return sorted(free, key=lambda pair: -pair[1])


def balance(
    unfinished: Mapping[str, Sequence[TailSample]],
    costs: StageCosts,
    lengths: LengthModel,
    transfer: Transfer = "Auto",
    resting: Collection[str] = (),
    *,
    paces: Mapping[str, WorkerPace] | None = None,
    lacking: Lacking = lacks_nothing,
) -> tuple[Reallocation, ...]:
    """Return the moves to make now, when the queue is empty.

    `unfinished` contains every worker that can decode, idle ones too; `paces` the workers with a measured pace.
    """
    loads = [load for load in _loads(unfinished, costs, lengths, paces or {}) if load.name not in resting]
    question = _Question(costs, lengths.max_tokens, transfer, lacking)
    answer: list[Reallocation] = []
    moved: set[int] = set()
    while len(loads) > 1 and len(moved) < MAX_MOVES:
        loads.sort(key=lambda load: (-load.finish(), load.name))
        source, destination = loads[0], loads[-1]
        best = _best(source, destination, moved, question)
        if best is None:
            break
        answer.append(best)
        for move in best.moves:
            moved.add(move.sample)
            destination.samples[move.sample] = source.samples.pop(move.sample)
    return tuple(answer)


def _loads(
    unfinished: Mapping[str, Sequence[TailSample]],
    costs: StageCosts,
    lengths: LengthModel,
    paces: Mapping[str, WorkerPace],
) -> Iterator[_Load]:
    everything = [sample for name in sorted(unfinished) for sample in unfinished[name]]
    tokens = np.array([sample.tokens for sample in everything], dtype=np.int64)
    prompts = np.array([sample.prompt_tokens for sample in everything], dtype=np.int64)
    left = iter(lengths.remaining_each(tokens, prompts, [sample.line for sample in everything]).tolist())
    context = float((tokens + prompts).mean()) if len(everything) else 0.0
    for name in sorted(unfinished):
        samples = unfinished[name]
        mine = sum(s.prompt_tokens + s.tokens for s in samples) / len(samples) if samples else context
        curve = ThroughputCurve(costs, mine, len(samples) + MAX_MOVES, paces.get(name, EVEN_PACE))
        yield _Load(name, samples, [next(left) for _ in samples], curve)


def _best(source: _Load, destination: _Load, moved: Collection[int], question: _Question) -> Reallocation | None:
    """Return the move of one or several samples that gains most of those tried, or None if none gains enough."""
    before = source.finish()
    best, most = None, MIN_GAIN * before
    chosen: list[tuple[TailSample, float]] = []
    moves: list[Move] = []
    cost = 0.0
    free = source.movable(moved)
    while len(moves) < MAX_MOVES - len(moved):
        free = [candidate for candidate in free if _fits(destination, chosen, candidate[0], question)]
        if not free:
            break
        step = -(-len(free) // CANDIDATES)
        gains = [_gain(source, destination, [*chosen, candidate], before) for candidate in free[::step]]
        candidate = free.pop(step * int(np.argmax(gains)))
        kv, own = _cost(candidate[0], destination, len(chosen) + 1, question)
        chosen.append(candidate)
        moves.append(Move(candidate[0].sample, source.name, destination.name, kv))
        cost += own
        won = max(gains) - cost
        if won > most:
            rates = source.rate + destination.rate, _rate_after(source, destination, len(chosen))
            best, most = Reallocation(tuple(moves), *rates, won), won
    return best


def _gain(source: _Load, destination: _Load, chosen: Sequence[tuple[TailSample, float]], before: float) -> float:
    """Return the seconds by which the later of the two finishes earlier."""
    gone, more = {sample.sample for sample, _ in chosen}, [left for _, left in chosen]
    after = max(source.curve.finish(source.left(gone)), destination.curve.finish(destination.left() + more))
    return before - after


def _rate_after(source: _Load, destination: _Load, count: int) -> float:
    stays, comes = len(source.samples) - count, len(destination.samples) + count
    return source.curve.tokens_per_second(stays) + destination.curve.tokens_per_second(comes)


def _fits(
    destination: _Load, chosen: Sequence[tuple[TailSample, float]], added: TailSample, question: _Question
) -> bool:
    """Return whether one more sample fits on the destination, in addition to the chosen ones."""
    there = [sample for sample, _ in (*destination.samples.values(), *chosen)]
    longest = max(sample.prompt_tokens for sample in (*there, added)) + question.limit
    return len(there) < min(question.costs.max_batch_size, question.costs.kv_rows(longest))


def _cost(sample: TailSample, destination: _Load, more: int, question: _Question) -> tuple[bool, float]:
    """Return (whether the KV cache moves, cost in seconds). A sample that moves with its cache is decoded meanwhile."""
    costs, transfer = question.costs, question.transfer
    batch = len(destination.samples) + more
    slower = (
        question.lacking(destination.name, sample) * costs.speculation.share_at(batch) if costs.speculation else 0.0
    )
    if sample.tokens == 0:
        return transfer == "KV" and bool(costs.bandwidth), costs.acknowledged_seconds + slower
    prompt, tokens = np.array([float(sample.prompt_tokens)]), np.array([float(sample.tokens)])
    if costs.takes_cache(prompt, tokens, batch, 0.0, transfer)[0]:  # its source decodes other samples in any case
        return True, costs.acknowledged_seconds + costs.pause_seconds(float(prompt[0] + tokens[0])) + slower
    return False, costs.rebuild_seconds(float(sample.prompt_tokens), float(sample.tokens), batch) + slower
