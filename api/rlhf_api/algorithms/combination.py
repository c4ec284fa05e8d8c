"""Combines several rewards of a response into one number. Rule: pure.

A reward that abstained is left out. `Combine.NORMALIZED_SUM` needs the whole batch; here it is the plain sum.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Combine(StrEnum):
    """Ways to combine rewards; w_k are weights, r_k the rewards of a response that did not abstain."""

    SUM = "Sum"
    """sum w_k r_k."""
    NORMALIZED_SUM = "NormalizedSum"
    """sum w_k (r_k - mean of k over the batch) / standard deviation of k over the batch."""
    MIN = "Min"
    """min w_k r_k."""
    MEAN_MINUS_VARIANCE = "MeanMinusVariance"
    """m - lambda v, with m = sum w_k r_k / sum w_k and v = sum w_k (r_k - m)^2 / sum w_k."""


@dataclass(frozen=True)
class Combination:
    """Names and weights of the rewards, and how to combine them."""

    weights: tuple[tuple[str, float], ...]
    """(name, weight), in the order of the manifest."""
    method: Combine = Combine.SUM
    variance_weight: float = 1.0
    """Weight lambda of the variance, with MeanMinusVariance."""

    def combine(self, rewards: Mapping[str, float]) -> float | None:
        """Return the combined reward of a response, None if all abstained. `rewards` by name, without abstentions."""
        terms = [(weight, rewards[name]) for name, weight in self.weights if name in rewards]
        if not terms:
            return None
        products = [weight * reward for weight, reward in terms]
        match self.method:
            case Combine.SUM | Combine.NORMALIZED_SUM:
                return math.fsum(products)
            case Combine.MIN:
                return min(products)
            case Combine.MEAN_MINUS_VARIANCE:
                whole = math.fsum(weight for weight, _ in terms)
                mean = math.fsum(products) / whole
                variance = math.fsum(weight * (reward - mean) ** 2 for weight, reward in terms) / whole
                return mean - self.variance_weight * variance
