"""`spec.rewardShaping`: what several rewards become together, and what a reward becomes before it is trained on."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.algorithms.combination import Combination, Combine
from rlhf_api.api_model import LARGEST, ApiModel


class RewardShaping(ApiModel):
    """The defaults change no reward."""

    combine: Literal["Sum", "NormalizedSum", "Min", "MeanMinusVariance"] = "Sum"
    """What several rewards become, weights w: Sum: sum w r. NormalizedSum: each is normalised over the batch to mean 0
    and standard deviation 1 first. Min: the least w r. MeanMinusVariance: weighted mean less varianceWeight times the
    weighted variance. A reward that abstained is left out."""
    variance_weight: Annotated[float, Field(ge=0, le=LARGEST)] = 1.0
    """Factor of the variance in MeanMinusVariance."""

    scale: Annotated[float, Field(gt=0, le=LARGEST)] = 1.0
    """Factor of the combined reward."""
    minimum: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None = None
    """Least reward after scaling: what is below becomes it. Unset: no bound."""
    maximum: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None = None
    """Greatest reward after scaling: what is above becomes it. Unset: no bound."""
    normalize: Literal["None", "Batch"] = "None"
    """Batch: bounded rewards are normalised over the batch to mean 0 and standard deviation 1."""
    overlong_buffer: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    """Last tokens of rollout.maxResponseTokens in which a response costs more and more, up to overlongPenalty.
    0: none."""
    overlong_penalty: Annotated[float, Field(ge=0, le=LARGEST)] = 1.0
    """What the longest response costs where overlongBuffer is set."""
    missing_end_penalty: Annotated[float, Field(ge=0, le=LARGEST)] = 0.0
    """What a response costs that did not end by itself."""
    truncated: Literal["Keep", "Mask", "Filter"] = "Keep"
    """Responses that were cut at rollout.maxResponseTokens. Keep: trained on like others. Mask: in no loss, but their
    rewards count in the baselines of others. Filter: as if they had abstained."""

    @property
    def changes_nothing(self) -> bool:
        """Whether every reward stays what its response was given."""
        of_each_response = RewardShaping(combine=self.combine, variance_weight=self.variance_weight)
        return self.combine != "NormalizedSum" and self == of_each_response

    def combination(self, weights: tuple[tuple[str, float], ...]) -> Combination:
        """Return the combination of rewards with these names and weights."""
        return Combination(weights, Combine(self.combine), self.variance_weight)
