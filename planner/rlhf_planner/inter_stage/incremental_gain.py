"""Computes the gain of scoring unfinished samples by replaying an iteration's finish times with and without it.

Rule: pure; times are seconds on one clock. Simplified: a response grows evenly, and a pass scores one prefix.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from rlhf_api.score_blocks import BLOCK
from rlhf_planner.inter_stage.fitted_costs import Floats, PassFormula
from rlhf_planner.inter_stage.length_distribution import Ints

MIN_GAIN: Final = 0.01
"""Share of generation and inference time that must be gained."""
MAX_PASSES: Final = 16384
"""Approximate limit of prefix passes. Beyond it several blocks count as one, which bounds the time of a replay."""
MAX_SAMPLES, MAX_WORKERS = 1024, 8
"""Limits of a replay.

Beyond them every second, third, ... sample and worker is used, always with the sample that finishes last.
"""


@dataclass
class PassSums:
    """Sums over observed passes, to which a setup time and a time per token are fitted."""

    passes: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    """Sum of squared tokens."""
    products: float = 0.0
    """Sum of tokens times seconds."""

    def add(self, tokens: float, seconds: float) -> None:
        """Count one pass."""
        self.passes += 1
        self.tokens += tokens
        self.seconds += seconds
        self.squares += tokens * tokens
        self.products += tokens * seconds

    def fitted(self) -> PassFormula:
        """Return the least-squares line, limited to non-negative coefficients. Without passes or tokens all costs are
        zero."""
        if not self.passes or not self.tokens:
            return PassFormula()
        spread = self.passes * self.squares - self.tokens**2
        slope = (self.passes * self.products - self.tokens * self.seconds) / spread if spread > 0 else math.inf
        slope = min(max(0.0, slope), self.seconds / self.tokens)
        # Rounding may give a value below zero, which would discard the facts of the whole iteration.
        return PassFormula(setup=max(0.0, self.seconds - slope * self.tokens) / self.passes, per_token=slope)


@dataclass(frozen=True)
class Trace:
    """Times of an iteration's generation, and the workers that could score."""

    begun: Floats
    """[n] time at which each sample was leased for decoding."""
    finished: Floats
    """[n] time at which each response was complete."""
    prompts: Ints
    """[n] prompt tokens."""
    responses: Ints
    """[n] response tokens."""
    joined: Mapping[int, float]
    """Worker -> time from which it could score."""

    def __post_init__(self) -> None:
        sizes = {len(self.begun), len(self.finished), len(self.prompts), len(self.responses)}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(f"a trace needs the same number of samples in all its parts, got {sorted(sizes)}")
        if not self.joined:
            raise ValueError("joined is empty: no worker scores")


@dataclass(frozen=True)
class TokenCosts:
    """Costs of scoring, by passes and tokens."""

    early: PassFormula
    """Cost of all tasks that can score a prefix."""
    late: PassFormula = field(default_factory=PassFormula)
    """Cost of all tasks that need the whole sample."""
    most: int = 1
    """Maximum finished samples in one pass."""

    def seconds(self, rest: float, whole: float) -> float:
        """Return the seconds of one pass over finished samples of `whole` tokens in total.

        The tasks that score prefixes have `rest` of these tokens left.
        """
        late = self.late.setup + whole * self.late.per_token
        return self.early.setup + rest * self.early.per_token + late

    def prefix_seconds(self, tokens: float) -> float:
        """Return the seconds of one pass over `tokens` tokens of an unfinished sample."""
        return self.early.setup + tokens * self.early.per_token


class CounterfactualScoring(NamedTuple):
    """One replay of scoring."""

    end: float
    """Time at which the last sample was scored."""
    early_tokens: float
    """Tokens scored in passes over prefixes."""
    passes: list[tuple[int, float, float, int]]
    """(worker, start, end, number of finished samples; 0 for a prefix)."""


class IncrementalGain(NamedTuple):
    """Times of a trace with and without incremental scoring."""

    without: float
    """Seconds from the first start until the last score, without incremental scoring."""
    with_prefixes: float
    early_share: float
    """Share of all tokens that were scored in passes over prefixes."""

    @property
    def worthwhile(self) -> bool:
        """Whether scoring prefixes gains enough."""
        return self.without - self.with_prefixes > MIN_GAIN * self.without


def incremental_gain(trace: Trace, costs: TokenCosts) -> IncrementalGain:
    """Return the gain that scoring prefixes would have had in an iteration. Large traces are thinned."""
    few = _thinned(trace)
    begin, tokens = float(few.begun.min()), int((few.prompts + few.responses).sum())
    without, early = score_trace(few, costs, prefixes=False), score_trace(few, costs, prefixes=True)
    return IncrementalGain(float(without.end) - begin, float(early.end) - begin, early.early_tokens / tokens)


def _thinned(trace: Trace) -> Trace:
    every = max(-(-len(trace.begun) // MAX_SAMPLES), -(-len(trace.joined) // MAX_WORKERS))
    if every == 1:
        return trace
    chosen = np.argsort(trace.finished, kind="stable")[::-1][::every]
    return Trace(
        trace.begun[chosen],
        trace.finished[chosen],
        trace.prompts[chosen],
        trace.responses[chosen],
        dict(sorted(trace.joined.items())[::every]),
    )


def score_trace(trace: Trace, costs: TokenCosts, *, prefixes: bool) -> CounterfactualScoring:
    """Replay the scoring of a trace, with or without prefixes."""
    queue = _Queue(trace, costs)
    free = [(moment, worker) for worker, moment in trace.joined.items()]
    heapq.heapify(free)
    while queue.left:
        moment, worker = heapq.heappop(free)
        if moment >= queue.next_finished:
            until = queue.score(moment, worker, len(trace.joined))
        elif prefixes:
            until = queue.begin(moment, worker)
        else:
            until = queue.next_finished
        heapq.heappush(free, (until, worker))
    return CounterfactualScoring(queue.end, float(queue.early), queue.passes)


class _Queue:
    """Finished and unfinished samples, and the scored tokens of each."""

    def __init__(self, trace: Trace, costs: TokenCosts) -> None:
        self._trace, self._costs = trace, costs
        self._whole = trace.prompts + trace.responses
        self._order = np.argsort(trace.finished, kind="stable")
        self._when: list[float] = trace.finished[self._order].tolist()
        self._next = 0
        self._done = np.zeros(len(self._whole), dtype=np.int64)
        self._owner = np.full(len(self._whole), -1)
        self._step = BLOCK * max(1, math.ceil(int(self._whole.sum()) / BLOCK / MAX_PASSES))
        self._pace = (trace.finished - trace.begun) / np.maximum(1, trace.responses)
        self.early = 0
        self.end = 0.0
        self.passes: list[tuple[int, float, float, int]] = []

    @property
    def left(self) -> int:
        """Number of samples that are not scored yet."""
        return len(self._when) - self._next

    @property
    def next_finished(self) -> float:
        """Time at which the first unscored sample is finished, in seconds."""
        return self._when[self._next]

    def score(self, moment: float, worker: int, workers: int) -> float:
        """Score a share of the waiting samples; return the end of the pass, in seconds."""
        waiting = int(np.searchsorted(self._when, moment, side="right")) - self._next
        taken = min(self._costs.most, max(1, waiting // workers))
        samples = self._order[self._next : self._next + taken]
        self._next += taken
        whole = int(self._whole[samples].sum())
        early = int(self._done[samples].sum())
        self.early += early
        return self._pass(worker, moment, self._costs.seconds(whole - early, whole), taken)

    def begin(self, moment: float, worker: int) -> float:
        """Score a prefix, or wait for a prefix or a finished sample; return the end, in seconds."""
        open_to = (self._trace.finished > moment) & ((self._owner == -1) | (self._owner == worker))
        ready = np.where(open_to, self._ready(moment) - self._done, 0)
        best = int(ready.argmax())
        if ready[best] >= self._step:
            tokens = int(ready[best])
            self._done[best] += tokens
            self._owner[best] = worker
            return self._pass(worker, moment, self._costs.prefix_seconds(tokens), 0)
        wanted = self._done + self._step + 1
        there = self._trace.begun + np.maximum(0, wanted - self._trace.prompts) * self._pace
        there = np.where(open_to & (wanted <= self._whole), there, math.inf)
        return max(math.nextafter(moment, math.inf), min(self.next_finished, float(there.min())))

    def _ready(self, moment: float) -> Ints:
        """Return the tokens [n] of each sample at `moment`, without the last one, in whole blocks."""
        grown = np.floor((moment - self._trace.begun) / np.maximum(self._pace, 1e-12) + 1e-6)
        lengths = np.where(grown >= 0, self._trace.prompts + np.minimum(grown, self._trace.responses), 0)
        answer: Ints = (np.maximum(lengths - 1, 0) // self._step * self._step).astype(np.int64)
        return answer

    def _pass(self, worker: int, start: float, seconds: float, samples: int) -> float:
        self.passes.append((worker, start, start + seconds, samples))
        self.end = max(self.end, start + seconds) if samples else self.end
        return start + seconds
