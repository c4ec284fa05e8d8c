"""Clipped importance sampling policy optimisation: fields and graph. Its losses are `rlhf_workers.algorithms.cispo`."""

from collections.abc import Iterator
from typing import ClassVar

from rlhf_api.algorithms.fields import LossAggregation, NonNegative, Positive
from rlhf_api.algorithms.grpo import GRPO
from rlhf_api.rules.rule import Rule


class CISPO(GRPO):
    """REINFORCE weighted by clipped ratios: clipping does not remove the gradient of a token."""

    summary: ClassVar = "Clipped importance sampling policy optimisation, no critic."

    kl_coefficient: NonNegative = 0.0
    """Weight of the KL divergence to the reference model; 0 trains without a reference."""
    clip_range: Positive = 1.0
    """The weight of a token is its ratio, clipped to [1 - clipRange, 1 + clipRangeHigh]; 1 or more means no lower
    bound."""
    clip_range_high: Positive | None = 0.2
    """Upper clip range; clipRange when null."""
    loss_aggregation: LossAggregation = "TokenMean"
    """See spec.algorithm.ppo.lossAggregation."""

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        yield from super().rules(path)
        below = path.replace("spec.", "self.", 1)
        yield Rule(
            field=f"{path}.dualClip",
            node="spec",
            cel=f"!has({below}) || !has({below}.dualClip)",
            holds=lambda values: not values.has(f"{path}.dualClip"),
            message=f"bounds a clipped loss, but cispo clips none: remove it, {path}.clipRangeHigh bounds every weight",
        )
