"""Learns from repeated prompts how much longer or shorter than usual a prompt's responses are.

A one-way random-effects model: a response's normal score is its prompt's effect, of variance `share`, plus a rest of
variance 1 - share.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rlhf_planner.inter_stage.length_distribution import Floats, Ints

MIN_SHARE: Final = 0.1
"""Share of the variance below which prompts count as uninformative."""
MIN_REPEATED: Final = 32
"""Prompts with two or more responses that an estimate needs."""
MAX_PROMPTS: Final = 65_536
"""Maximum number of remembered prompts, the most recent ones."""
KEPT: Final = 0.5
"""Weight of earlier scores when a prompt is seen again."""

_NO_LINES: Final[Ints] = np.zeros(0, dtype=np.int64)
_NO_SUMS: Final[Floats] = np.zeros((0, 3))


@dataclass(frozen=True)
class PromptEffects:
    """Remembered effects of each prompt. See the module."""

    lines: Ints = field(default_factory=lambda: _NO_LINES)
    """[p] prompt lines, rising."""
    sums: Floats = field(default_factory=lambda: _NO_SUMS)
    """[p, 3] weight of its responses, weighted sum of their scores, weighted sum of the squares."""
    seen: Ints = field(default_factory=lambda: _NO_LINES)
    """[p] number of the batch in which the prompt was last seen."""
    batches: int = 0
    share: float = 0.0
    """Share of the variance of scores between prompts, 0..1; 0 means that prompts are uninformative."""

    def with_batch(self, lines: Ints, scores: Floats) -> PromptEffects:
        """Return the effects after the responses of one more batch.

        `lines` int64 [n] are the prompts, `scores` float64 [n] are normal scores.
        """
        after = dataclasses.replace(self._with(lines, scores), batches=self.batches + 1)
        if len(after.lines) > MAX_PROMPTS:
            most_seen = np.sort(np.argsort(-after.seen, kind="stable")[:MAX_PROMPTS])
            after = dataclasses.replace(
                after, lines=after.lines[most_seen], sums=after.sums[most_seen], seen=after.seen[most_seen]
            )
        return dataclasses.replace(after, share=_share(after.sums))

    def _with(self, lines: Ints, scores: Floats) -> PromptEffects:
        """Return the effects with new responses, after weighting earlier scores of their prompts by KEPT."""
        names, where = np.unique(lines, return_inverse=True)
        columns = [np.bincount(where, weights=power, minlength=len(names)) for power in (scores**0, scores, scores**2)]
        sums = np.stack(columns, axis=1)
        rows = self._rows(names)
        before = rows >= 0
        sums[before] = sums[before] + KEPT * self.sums[rows[before]]
        others = np.isin(self.lines, names, invert=True)
        merged = np.concatenate([self.lines[others], names])
        order = np.argsort(merged)
        seen = np.concatenate([self.seen[others], np.full(len(names), self.batches, dtype=np.int64)])
        return dataclasses.replace(
            self, lines=merged[order], sums=np.concatenate([self.sums[others], sums])[order], seen=seen[order]
        )

    def expected(self, lines: Ints) -> tuple[Floats, Floats]:
        """Return (expected effect, remaining variance) of the prompts at `lines` int64 [n], each float64 [n]."""
        rows = self._rows(lines)
        weight = np.where(rows >= 0, self.sums[rows, 0] if len(self.sums) else 0.0, 0.0)
        total = np.where(rows >= 0, self.sums[rows, 1] if len(self.sums) else 0.0, 0.0)
        divisor = self.share * weight + 1 - self.share
        return self.share * total / divisor, self.share * (1 - self.share) / divisor

    def _rows(self, lines: Ints) -> Ints:
        """Return [n] rows of these prompts, -1 where unknown."""
        if not len(self.lines):
            return np.full(len(lines), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.lines, lines), len(self.lines) - 1)
        return np.where(self.lines[at] == lines, at, -1).astype(np.int64)


def _share(sums: Floats) -> float:
    """Return the intraclass correlation from a one-way analysis of variance; 0 where it is low or unknown."""
    weight, total, square = sums[sums[:, 0] > 1].T
    groups, everything = len(weight), float(weight.sum())
    if groups < MIN_REPEATED:
        return 0.0
    within = float((square - total**2 / weight).sum()) / (everything - groups)
    between = float((total**2 / weight).sum() - total.sum() ** 2 / everything) / (groups - 1)
    per_group = (everything - float((weight**2).sum()) / everything) / (groups - 1)
    spread = max(0.0, (between - within) / per_group)
    share = spread / (spread + within) if spread else 0.0
    return min(share, 1 - 1e-6) if share >= MIN_SHARE else 0.0
