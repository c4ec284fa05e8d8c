"""How much longer or shorter than usual the responses of a prompt are: learned where prompts repeat.

A response's normal score is its prompt's effect plus randomness: score = effect + rest, the effects of all prompts
normal with variance `share` and the rest with 1 - share (a one-way random-effects model; the share is the intraclass
correlation, estimated from the variance within prompts and between them). What is expected of a prompt is shrunk
toward nothing, the more so the fewer responses of it were seen. Scores are relative to all responses of their time, so
training that makes everything longer leaves the effects as they are. Rule: values only; where prompts do not repeat,
or tell nothing, `share` is 0 and nobody's answer changes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rlhf_planner.inter_stage.length_distribution import Floats, Ints

MIN_SHARE: Final = 0.1
"""Share of the variance below which prompts are taken to tell nothing."""
MIN_REPEATED: Final = 32
"""Prompts with two responses or more that an estimate needs: of fewer it is mostly randomness."""
MAX_PROMPTS: Final = 65_536
"""Prompts that are remembered, the last seen: a few megabytes."""
KEPT: Final = 0.5
"""Weight of what was known of a prompt when it is seen again: training changes what is hard."""

_NO_LINES: Final[Ints] = np.zeros(0, dtype=np.int64)
_NO_SUMS: Final[Floats] = np.zeros((0, 3))


@dataclass(frozen=True)
class PromptEffects:
    """What is known of each prompt. See the module."""

    lines: Ints = field(default_factory=lambda: _NO_LINES)
    """[p] prompts, rising."""
    sums: Floats = field(default_factory=lambda: _NO_SUMS)
    """[p, 3] weight of its responses, sum of their scores, sum of the squares."""
    seen: Ints = field(default_factory=lambda: _NO_LINES)
    """[p] number of the batch in which it was last seen."""
    batches: int = 0
    share: float = 0.0
    """Of the variance of scores that is between prompts, 0..1; 0: prompts tell nothing."""

    def with_batch(self, lines: Ints, scores: Floats) -> PromptEffects:
        """Return what is known after the responses of one more batch; `lines` int64 [n] says which prompts, `scores`
        float64 [n] are normal scores."""
        after = dataclasses.replace(self._with(lines, scores), batches=self.batches + 1)
        if len(after.lines) > MAX_PROMPTS:
            kept = np.sort(np.argsort(-after.seen, kind="stable")[:MAX_PROMPTS])
            after = dataclasses.replace(after, lines=after.lines[kept], sums=after.sums[kept], seen=after.seen[kept])
        return dataclasses.replace(after, share=_share(after.sums))

    def _with(self, lines: Ints, scores: Floats) -> PromptEffects:
        """New responses added, what was known of their prompts weighted by KEPT."""
        names, where = np.unique(lines, return_inverse=True)
        columns = [np.bincount(where, weights=power, minlength=len(names)) for power in (scores**0, scores, scores**2)]
        sums = np.stack(columns, axis=1)
        known = self._rows(names)
        before = known >= 0
        sums[before] = sums[before] + KEPT * self.sums[known[before]]
        others = np.isin(self.lines, names, invert=True)
        merged = np.concatenate([self.lines[others], names])
        order = np.argsort(merged)
        seen = np.concatenate([self.seen[others], np.full(len(names), self.batches, dtype=np.int64)])
        return dataclasses.replace(
            self, lines=merged[order], sums=np.concatenate([self.sums[others], sums])[order], seen=seen[order]
        )

    def expected(self, lines: Ints) -> tuple[Floats, Floats]:
        """Return (expected effect, variance that is left of it) of the prompts at `lines` int64 [n], each float64
        [n]."""
        rows = self._rows(lines)
        weight = np.where(rows >= 0, self.sums[rows, 0] if len(self.sums) else 0.0, 0.0)
        total = np.where(rows >= 0, self.sums[rows, 1] if len(self.sums) else 0.0, 0.0)
        known = self.share * weight + 1 - self.share
        return self.share * total / known, self.share * (1 - self.share) / known

    def _rows(self, lines: Ints) -> Ints:
        """[n] rows of these prompts, -1 where unknown."""
        if not len(self.lines):
            return np.full(len(lines), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.lines, lines), len(self.lines) - 1)
        return np.where(self.lines[at] == lines, at, -1).astype(np.int64)


def _share(sums: Floats) -> float:
    """Intraclass correlation by one-way analysis of variance; 0 where it is low or unknown."""
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
