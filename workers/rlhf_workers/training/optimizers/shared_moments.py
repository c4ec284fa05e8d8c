"""AdamW moments that the copies of a stage share out: which copy steps which parameter.

A copy keeps moments, and steps, of its share of the parameters alone, and then hands each on to the other copies, which
hold whole weights and whole sums of gradients as ever (ZeRO stage 1, Rajbhandari et al. 2020, section 5.1; by whole
parameters, as PyTorch's ZeroRedundancyOptimizer, so that every parameter is stepped by the same kernel on the same
shape and has the bits that a copy of its own would give it). Rule: shares follow from sizes alone, so every copy works
them out by itself. A copy that dies in between loses what any rank loses: the group starts again from its checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from rlhf_api.job.groups import TrainingParallelism
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.parallel.tensor_parts import near_equal_keepers

PART: Final = "-data-{:05d}"
"""Ends the name of a copy's file of moments."""


@dataclass(frozen=True)
class MomentShares:
    """Of one stage, or of a tensor rank's part of it."""

    holders: tuple[int, ...]
    """Global ranks of the copies."""
    number: int
    """Which of them this rank is."""

    @property
    def part(self) -> str:
        """Return the ending of this copy's file of moments."""
        return PART.format(self.number) if len(self.holders) > 1 else ""

    def steppers(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return name -> number of the copy that steps it, the largest first: so the largest share is little above the
        mean."""
        sizes = {name: value.numel() for name, value in parameters.items() if value.numel()}
        largest_first = dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
        return near_equal_keepers(largest_first, len(self.holders))


WHOLE: Final = MomentShares((0,), 0)
"""Of a stage whose every copy keeps all moments."""


def moment_shares(layout: RankLayout, model: str, stage: int, parallelism: TrainingParallelism) -> MomentShares:
    """Return the shares of a stage that this rank holds."""
    if not parallelism.shard_optimizer:
        return WHOLE
    holders = layout.holders(model, stage)
    return MomentShares(holders, holders.index(layout.rank))
