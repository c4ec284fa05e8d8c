"""`spec.rewardShaping`: how several rewards are combined, and how a reward changes before training."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.algorithms.combination import Combination, Combine
from rlhf_api.api_model import LARGEST, ApiModel


class RewardShaping(ApiModel):
    """The defaults change no reward."""

    combine: Literal["Sum", "NormalizedSum", "Min", "MeanMinusVariance"] = "Sum"
    """How several rewards r with weights w combine. Sum: sum w r. NormalizedSum: the same after normalising each to
    mean 0 and standard deviation 1 over the batch for training; shown rewards are sums. Min: the least w r.
    MeanMinusVariance: weighted mean minus varianceWeight times weighted variance. Abstentions are left out."""
    variance_weight: Annotated[float, Field(ge=0, le=LARGEST)] = 1.0
    """Factor of the variance in MeanMinusVariance."""

    scale: Annotated[float, Field(gt=0, le=LARGEST)] = 1.0
    """Factor of the combined reward."""
    minimum: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None = None
    """Lower bound of the scaled reward; smaller values are clipped. Unset: no bound."""
    maximum: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None = None
    """Upper bound of the scaled reward; larger values are clipped. Unset: no bound."""
    normalize: Literal["None", "Batch"] = "None"
    """Batch: normalise the clipped rewards over the batch to mean 0 and standard deviation 1."""
    overlong_buffer: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    """Last tokens of rollout.maxResponseTokens over which the penalty of a response grows to overlongPenalty. 0:
    none."""
    overlong_penalty: Annotated[float, Field(ge=0, le=LARGEST)] = 1.0
    """Penalty of the longest response if overlongBuffer is set."""
    missing_end_penalty: Annotated[float, Field(ge=0, le=LARGEST)] = 0.0
    """Penalty of a response that does not end by itself."""
    truncated: Literal["Keep", "Mask", "Filter"] = "Keep"
    """Responses cut at rollout.maxResponseTokens. Keep: trained on like others. Mask: in no loss, but their rewards
    count in the baselines of others. Filter: treated as abstentions."""

    @property
    def changes_nothing(self) -> bool:
        """Whether all settings but those of the combination are defaults, and the combination is not NormalizedSum."""
        of_each_response = RewardShaping(combine=self.combine, variance_weight=self.variance_weight)
        return self.combine != "NormalizedSum" and self == of_each_response

    def combination(self, weights: tuple[tuple[str, float], ...]) -> Combination:
        """Return the combination of rewards with these names and weights."""
        return Combination(weights, Combine(self.combine), self.variance_weight)
