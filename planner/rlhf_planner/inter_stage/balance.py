"""Moves before the threshold: from the worker that would finish last to one that would run dry.

Rule: one pair of workers after the other, one sample at a time, and only while the later of the two is predicted to
finish earlier by more than the move costs and by MIN_GAIN of what is left. Workers in `resting` are left alone: the
caller puts those there that took part in a move lately. The same question always gets the same answer. Must never move
a sample twice, nor give a worker more than it has rows and KV memory for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from rlhf_planner.inter_stage.costs import StageCosts, Transfer
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.tail_placement import Move, TailSample

MIN_GAIN: Final = 0.05
"""Of the longer of two predicted finishes: predictions of lengths are no better than this."""
MAX_MOVES: Final = 8
"""In one answer: the next one sees what they did."""


class _Load:
    """What one worker still has to do. It finishes after about alpha * steps + beta * (rows' steps in total)."""

    def __init__(self, name: str, samples: Sequence[TailSample], left: Sequence[float], costs: StageCosts) -> None:
        self.name, self._rows = name, costs.max_batch_size
        self.samples = {sample.sample: (sample, tokens) for sample, tokens in zip(samples, left, strict=True)}
        context = sum(s.prompt_tokens + s.tokens for s in samples) / max(1, len(samples))
        batch = min(self._rows, max(2, len(samples)))
        one = costs.decode_seconds(1, context)
        self._beta = max(0.0, costs.decode_seconds(batch, context) - one) / max(1, batch - 1)
        self._alpha = max(0.0, one - self._beta)
        self.count()

    def count(self) -> None:
        """Sum up what is left, after `samples` changed."""
        left = sorted((tokens for _, tokens in self.samples.values()), reverse=True)
        self._total, self._two_longest = sum(left), (*left[:2], 0.0, 0.0)[:2]
        self.longest_prompt = max((sample.prompt_tokens for sample, _ in self.samples.values()), default=0)

    def finish(self, less: float = 0.0, more: float = 0.0) -> float:
        """Return the seconds until it finishes, with a sample of `less` tokens taken away, or another one of `more`
        tokens."""
        first, second = self._two_longest
        longest = max(more, second if less == first else first)
        total = self._total - less + more
        return self._alpha * max(longest, total / self._rows) + self._beta * total


def balance(
    held: Mapping[str, Sequence[TailSample]],
    costs: StageCosts,
    lengths: LengthModel,
    transfer: Transfer = "Auto",
    resting: Collection[str] = (),
) -> tuple[Move, ...]:
    """Return the moves to make now, when nothing is queued any more; none when none is worth it.

    `held` names every live generation worker, idle ones too.
    """
    everything = [sample for name in sorted(held) for sample in held[name]]
    tokens = np.array([sample.tokens for sample in everything], dtype=np.int64)
    prompts = np.array([sample.prompt_tokens for sample in everything], dtype=np.int64)
    lines = [sample.line for sample in everything]
    left = iter(lengths.remaining_each(tokens, prompts, lines).tolist())
    loads = [_Load(name, held[name], [next(left) for _ in held[name]], costs) for name in sorted(held)]
    loads = [load for load in loads if load.name not in resting]
    moves: list[Move] = []
    moved: set[int] = set()
    while len(loads) > 1 and len(moves) < MAX_MOVES:
        loads.sort(key=lambda load: (-load.finish(), load.name))
        source, destination = loads[0], loads[-1]
        best = _best(source, destination, moved, costs, lengths.max_tokens, transfer)
        if best is None:
            break
        moves.append(best)
        moved.add(best.sample)
        destination.samples[best.sample] = source.samples.pop(best.sample)
        source.count()
        destination.count()
    return tuple(moves)


def _best(
    source: _Load, destination: _Load, moved: set[int], costs: StageCosts, limit: int, transfer: Transfer
) -> Move | None:
    """The move between the two that gains most, when that is enough."""
    before = source.finish()
    answer, most = None, MIN_GAIN * before
    for sample, (one, left) in sorted(source.samples.items()):
        if sample in moved or not _fits(destination, one, costs, limit):
            continue
        after = max(source.finish(less=left), destination.finish(more=left))
        kv, cost = _cost(one, len(destination.samples) + 1, costs, transfer)
        if before - after - cost > most:
            most = before - after - cost
            answer = Move(sample, source.name, destination.name, kv)
    return answer


def _fits(destination: _Load, sample: TailSample, costs: StageCosts, limit: int) -> bool:
    longest = max(sample.prompt_tokens, destination.longest_prompt) + limit
    return len(destination.samples) < min(costs.max_batch_size, costs.kv_rows(longest))


def _cost(sample: TailSample, batch: int, costs: StageCosts, transfer: Transfer) -> tuple[bool, float]:
    """(with its KV cache, seconds that it costs: a sample that moves with its cache is decoded on meanwhile)."""
    if sample.tokens == 0:
        return transfer == "KV" and bool(costs.bandwidth), costs.acknowledged_seconds
    prompt, tokens = np.array([float(sample.prompt_tokens)]), np.array([float(sample.tokens)])
    if costs.takes_cache(prompt, tokens, batch, 0.0, transfer)[0]:  # its source decodes others on in any case
        return True, costs.acknowledged_seconds + costs.pause_seconds(float(prompt[0] + tokens[0]))
    return False, costs.rebuild_seconds(float(sample.prompt_tokens), float(sample.tokens), batch)
