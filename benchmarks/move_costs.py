"""Computes the observed cost of moves, and the length from which a KV cache pays: measured, and as the planner
predicts.

Rule: pure. Both use the planner's own criterion (`StageCosts.takes_cache`). A move with the cache costs its pause and
the share `SHARE` of the rest. A move by tokens costs the whole time without the sample's next token. Measured costs
are straight lines through all single moves, so that no single one decides.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from rlhf_planner.inter_stage.costs import StageCosts

SHARE: Final = 1 / 2
"""With two workers, the source is one of two that could score."""


@dataclass(frozen=True)
class Moved:
    """One sample moved with its cache, and a similar one by its tokens. Tokens are response tokens at that time."""

    target: int
    """Tokens with which both started."""
    repeat: int
    kv_tokens: int
    kv_bytes: int
    kv_seconds: float
    paused_seconds: float
    tokens: int
    seconds: float

    @property
    def kv_cost(self) -> float:
        """Cost of the move with the cache, as the planner counts it."""
        return SHARE * self.kv_seconds + (1 - SHARE) * self.paused_seconds


def crossover(moves: Sequence[Moved]) -> float | None:
    """Return the number of response tokens from which the cache costs less.

    This is the shortest measured length if it always costs less, and None if it never does.
    """
    kv = _line([(move.kv_tokens, move.kv_cost) for move in moves])
    bare = _line([(move.tokens, move.seconds) for move in moves])
    lengths = [move.tokens for move in moves] + [move.kv_tokens for move in moves]
    shortest, longest = float(min(lengths)), float(max(lengths))
    gains = [(bare[0] - kv[0]) * at + bare[1] - kv[1] for at in (shortest, longest)]
    if gains[1] <= 0:
        return None
    return shortest if gains[0] > 0 else shortest + (longest - shortest) * -gains[0] / (gains[1] - gains[0])


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return (slope, value at 0) by least relative squares."""
    x, y = np.array(points, dtype=float).T
    slope, base = np.polyfit(x, y, 1, w=1 / y)
    return float(slope), float(base)


def predicted(costs: StageCosts, prompt: int, longest: int) -> int | None:
    """Return the planner's number of response tokens from which a sample moves with its cache; None if it never
    does."""
    tokens = np.arange(1.0, longest + 1)
    by_kv = costs.takes_cache(np.full_like(tokens, prompt), tokens, 1, SHARE, "Auto")
    return int(tokens[by_kv][0]) if by_kv.any() else None


def summary(moves: Sequence[Moved], before: StageCosts, after: StageCosts, prompt: int) -> dict[str, Any]:
    """Return medians for every length with the planner's predictions, and the crossovers."""
    longest = 2 * max(move.tokens for move in moves)
    repeats = sorted({move.repeat for move in moves})
    single = [crossover([move for move in moves if move.repeat == repeat]) for repeat in repeats]
    return {
        "crossover_tokens": crossover(moves),
        "crossover_tokens_by_repeat": single,
        "predicted_crossover_tokens": predicted(before, prompt, longest),
        "learned_crossover_tokens": predicted(after, prompt, longest),
        "ratios": dict(after.scale),
        "kv_bytes_per_token": before.kv_bytes_per_token,
        "points": [
            _point([move for move in moves if move.target == target], before, after, prompt)
            for target in sorted({move.target for move in moves})
        ],
        "moves": [asdict(move) for move in moves],
    }


def _point(moves: Sequence[Moved], before: StageCosts, after: StageCosts, prompt: int) -> dict[str, float]:
    """Return medians of the moves of one length; times in milliseconds."""

    def median(of: Callable[[Moved], float], scale: float = 1.0) -> float:
        return scale * statistics.median(of(move) for move in moves)

    kv_tokens, tokens = median(lambda move: move.kv_tokens), median(lambda move: move.tokens)
    step = after.decode_seconds(1, prompt + tokens)
    answer = {
        "kv_tokens": kv_tokens,
        "kv_bytes": median(lambda move: move.kv_bytes),
        "kv_ms": median(lambda move: move.kv_seconds, 1e3),
        "paused_ms": median(lambda move: move.paused_seconds, 1e3),
        "paused_steps": median(lambda move: move.paused_seconds) / step,
        "kv_cost_ms": median(lambda move: move.kv_cost, 1e3),
        "tokens": tokens,
        "by_tokens_ms": median(lambda move: move.seconds, 1e3),
        "by_tokens_steps": median(lambda move: move.seconds) / step,
    }
    for name, costs in (("predicted", before), ("learned", after)):
        answer |= {
            f"{name}_kv_ms": 1e3 * costs.kv_seconds(prompt + kv_tokens),
            f"{name}_paused_ms": 1e3 * costs.pause_seconds(prompt + kv_tokens),
            f"{name}_kv_cost_ms": 1e3 * costs.kv_cost(prompt + kv_tokens, SHARE),
            f"{name}_by_tokens_ms": 1e3 * costs.rebuild_seconds(prompt, tokens, 1),
        }
    return answer


def lines(setting: dict[str, Any]) -> Iterable[str]:
    """Yield a setting's results as text."""
    yield f"{setting['name']}; medians in ms, in brackets what is predicted before and after learning"
    for point in setting["points"]:
        yield (
            "{kv_tokens:5.0f} tokens, {kv_bytes:9,.0f} bytes: KV {kv_ms:6.1f} ({predicted_kv_ms:.1f}, "
            "{learned_kv_ms:.1f}), paused {paused_ms:5.1f} = {paused_steps:.1f} steps ({predicted_paused_ms:.1f}, "
            "{learned_paused_ms:.1f}), costs {kv_cost_ms:6.1f} ({predicted_kv_cost_ms:.1f}, {learned_kv_cost_ms:.1f}); "
            "by tokens at {tokens:.0f}: {by_tokens_ms:7.1f} = {by_tokens_steps:.1f} steps "
            "({predicted_by_tokens_ms:.1f}, {learned_by_tokens_ms:.1f})".format(**point)
        )
    single = ", ".join(
        "none" if tokens is None else f"{tokens:.0f}" for tokens in setting["crossover_tokens_by_repeat"]
    )
    at = setting["crossover_tokens"]
    yield (
        f"  the KV cache costs less from {'no measured length' if at is None else f'{at:.0f} tokens'} (single repeats: "
        f"{single}); predicted {setting['predicted_crossover_tokens']}, once learned "
        f"{setting['learned_crossover_tokens']}"
    )
    yield "  ratios: " + ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in sorted(setting["ratios"].items()))
