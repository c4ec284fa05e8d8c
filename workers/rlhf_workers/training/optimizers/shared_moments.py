"""AdamW moments divided over the copies of a stage: which copy steps which parameter.

A copy steps only its share of the parameters, and sends it to the others, which hold whole weights and sums of
gradients (ZeRO stage 1, Rajbhandari et al. 2020, section 5.1).

Rule: shares depend on names and sizes, so every copy computes them independently.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from rlhf_api.job.groups import TrainingParallelism
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.parallel.tensor_parts import near_equal_keepers

PART: Final = "-data-{:05d}"
"""Suffix of a copy's file of moments."""


@dataclass(frozen=True)
class MomentShares:
    """Shares of one stage, or of a tensor rank's part of it."""

    holders: tuple[int, ...]
    """Global ranks of the copies that share the moments; a placeholder in WHOLE."""
    number: int
    """Index of this rank in `holders`."""

    @property
    def part(self) -> str:
        """The suffix of this copy's file of moments; empty without shares."""
        return PART.format(self.number) if len(self.holders) > 1 else ""

    def steppers(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return name -> number of the copy that steps it. The largest are assigned first, each to the smallest
        share."""
        sizes = {name: value.numel() for name, value in parameters.items() if value.numel()}
        largest_first = dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
        return near_equal_keepers(largest_first, len(self.holders))


WHOLE: Final = MomentShares((0,), 0)
"""Shares of a stage whose copies all keep all moments."""


def moment_shares(layout: RankLayout, model: str, stage: int, parallelism: TrainingParallelism) -> MomentShares:
    """Return the shares of a stage on this rank."""
    if not parallelism.shard_optimizer:
        return WHOLE
    holders = layout.holders(model, stage)
    return MomentShares(holders, holders.index(layout.rank))
