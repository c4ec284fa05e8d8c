"""Chooses the workers of the migration pool, and a worker for each unfinished sample.

Rule: the workers with the most predicted work stay. Must never give a sample two places, or a worker more samples than
it can take.

Source: RLHFuse (arXiv 2409.13221), inter-stage fusion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from rlhf_planner.inter_stage.costs import Flags, StageCosts, Transfer
from rlhf_planner.inter_stage.fitted_costs import Floats
from rlhf_planner.inter_stage.length_distribution import Ints
from rlhf_planner.inter_stage.lengths import LengthModel

MIN_BETA: Final = 1e-9
"""Minimum cost of a further row, as a share of a token's seconds in a batch of one.

It spreads samples evenly where the batch size has no cost.
"""


@dataclass(frozen=True)
class TailSample:
    """A sample in decoding, or waiting for it."""

    sample: int
    prompt_tokens: int
    tokens: int
    """Tokens decoded so far."""
    line: int = 0
    """Line of its prompt; 0 if unknown."""


class Move(NamedTuple):
    """Move of one sample to another worker; `kv` means with its KV cache, otherwise by its tokens."""

    sample: int
    source: str
    destination: str
    kv: bool


class TailPlacement(NamedTuple):
    """Workers of the pool, in order of their names, and the moves to them, longest samples first."""

    pool: tuple[str, ...]
    moves: tuple[Move, ...]


class UnfinishedColumns(NamedTuple):
    """Unfinished samples as columns, all [k]; `worker` is an index."""

    worker: Ints
    prompt: Ints
    tokens: Ints
    remaining: Floats
    """Predicted remaining tokens."""


def place_tail(
    unfinished: Mapping[str, Sequence[TailSample]],
    pool: int,
    costs: StageCosts,
    lengths: LengthModel,
    transfer: Transfer = "Auto",
) -> TailPlacement:
    """Return the pool and the moves when the threshold is reached.

    `unfinished` contains every worker that can decode, idle ones too. Raises ValueError without a worker, for a pool
    below 1, or for a sample that is listed twice.
    """
    names = sorted(unfinished)
    if not names:
        raise ValueError("no generation workers: a tail needs at least one")
    if pool < 1:
        raise ValueError(f"pool is {pool}, must be at least 1")
    rows = [(index, sample) for index, name in enumerate(names) for sample in unfinished[name]]
    _require_once([sample.sample for _, sample in rows])
    columns = _columns(rows, lengths)
    stays, moving, destination, kv = assign(columns, len(names), pool, costs, lengths.max_tokens, transfer)
    always = transfer == "KV" and bool(costs.bandwidth)
    moves = tuple(
        Move(rows[row][1].sample, names[rows[row][0]], names[to], by_kv or always)
        for row, to, by_kv in zip(moving.tolist(), destination.tolist(), kv.tolist(), strict=True)
    )
    return TailPlacement(tuple(names[index] for index in stays), moves)


def _columns(rows: Sequence[tuple[int, TailSample]], lengths: LengthModel) -> UnfinishedColumns:
    table = np.array([(index, s.prompt_tokens, s.tokens) for index, s in rows], dtype=np.int64).reshape(-1, 3)
    worker, prompt, tokens = table[:, 0], table[:, 1], table[:, 2]
    return UnfinishedColumns(worker, prompt, tokens, lengths.remaining_each(tokens, prompt, [s.line for _, s in rows]))


def _require_once(samples: Sequence[int]) -> None:
    if len(set(samples)) < len(samples):
        twice = next(sample for sample in samples if samples.count(sample) > 1)
        raise ValueError(f"sample {twice} is listed twice")


def assign(
    unfinished: UnfinishedColumns, workers: int, pool: int, costs: StageCosts, limit: int, transfer: Transfer
) -> tuple[list[int], Ints, Ints, Flags]:
    """Return (workers that stay, rows of `unfinished` that move, destination of each, whether with its KV cache).

    The last three are [moved].
    """
    work = np.bincount(unfinished.worker, weights=unfinished.remaining, minlength=workers)
    count = np.bincount(unfinished.worker, minlength=workers)
    order = np.lexsort((np.arange(workers), -count, -work)).tolist()
    longest = int((unfinished.prompt + limit).max(initial=1))
    rows = min(costs.max_batch_size, costs.kv_rows(longest))
    pool = _enough(count[order], min(pool, workers), rows)
    stays = sorted(order[:pool])
    staying = np.zeros(workers, dtype=np.bool_)
    staying[stays] = True
    moving = np.flatnonzero(~staying[unfinished.worker])
    moving = moving[np.argsort(-unfinished.remaining[moving], kind="stable")]
    destination = _destinations(unfinished, moving, stays, rows, costs)
    batch = max(1, min(costs.max_batch_size, -(-len(unfinished.worker) // pool)))
    prompt, tokens = unfinished.prompt[moving].astype(np.float64), unfinished.tokens[moving].astype(np.float64)
    return stays, moving, destination, costs.takes_cache(prompt, tokens, batch, 1 / workers, transfer)


def _enough(count: Ints, pool: int, rows: int) -> int:
    """Return the smallest pool of at least `pool` workers, in this order, with rows for the samples of all others."""
    others = int(count.sum()) - count.cumsum()
    room = np.maximum(0, rows - count).cumsum()
    fits = others <= room
    fits[: pool - 1] = False
    return int(np.argmax(fits)) + 1  # all workers together always fit: no sample has to move


def _destinations(
    unfinished: UnfinishedColumns, moving: Ints, stays: Sequence[int], rows: int, costs: StageCosts
) -> Ints:
    """Return, for each moving row, the worker with a free row that is predicted to finish first with it.

    A worker finishes after alpha * (its longest remaining) + beta * (the sum of all remaining).
    """
    alpha, beta = _affine_step(unfinished, len(stays), costs)
    position = {worker: at for at, worker in enumerate(stays)}
    longest = np.zeros(len(stays))
    total = np.zeros(len(stays))
    count = np.zeros(len(stays), dtype=np.int64)
    for worker, remaining in zip(unfinished.worker.tolist(), unfinished.remaining.tolist(), strict=True):
        at = position.get(worker)
        if at is not None:
            longest[at] = max(longest[at], remaining)
            total[at] += remaining
            count[at] += 1
    total[count >= rows] = np.inf
    answer = np.empty(len(moving), dtype=np.int64)
    for index, remaining in enumerate(unfinished.remaining[moving].tolist()):
        at = int(np.argmin(alpha * np.maximum(longest, remaining) + beta * total))
        answer[index] = stays[at]
        longest[at] = max(longest[at], remaining)
        count[at] += 1
        total[at] = total[at] + remaining if count[at] < rows else np.inf
    return answer


def _affine_step(unfinished: UnfinishedColumns, pool: int, costs: StageCosts) -> tuple[float, float]:
    """Return (alpha, beta): a token of each of b rows takes about alpha + beta * b, near the pool's later batch
    size."""
    batch = min(costs.max_batch_size, max(2, -(-len(unfinished.worker) // pool)))
    context = float((unfinished.prompt + unfinished.tokens).mean()) if len(unfinished.worker) else 0.0
    single, many = costs.token_seconds(1, context), costs.token_seconds(batch, context)
    beta = max(0.0, many - single) / max(1, batch - 1)
    return max(single - beta, 0.0), max(beta, MIN_BETA * single)
