"""Divergence from the reference model: per-token estimators and the controller of its weight.

With x = log p(token) of the trained policy and r = log p(token) of the reference, for tokens sampled from the policy:
k1 = x - r is unbiased and may be negative; k3 = exp(r - x) - 1 - (r - x) is unbiased too, never negative, and usually
has less variance. k3 grows with the ratio of probabilities, so `k3` is at most K3_LIMIT, without a gradient there.
`measured_k3` is without that limit.

The estimators have different mean gradients as terms of a loss. If the policy is the sampling one, that of k1 is 0,
that of k2 = (x - r)^2 / 2 is the gradient of KL(policy || reference), and that of k3 is the gradient of KL(reference ||
policy). k3 times the ratio of the policy to the sampling policy has mean and gradient of KL(policy || reference).

Source: Schulman, "Approximating KL divergence" (2020); the weighted form: DeepSeek-AI, "DeepSeek-V3.2" (2025), section
3.1; the controller: Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section 2.2.
"""

import math
from typing import Final

import torch

from rlhf_api.algorithms.fields import KLEstimator
from rlhf_workers.losses.ppo import limited_log_ratio

K3_LIMIT: Final = 10.0
"""Limit in nats per token, reached if the reference is 14 times as probable."""
ERROR_LIMIT: Final = 0.2
"""Bound of the relative error of one iteration before it moves the coefficient (Ziegler et al.)."""


def k1(log_probabilities: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return x - r, in the same shape; differentiable."""
    return log_probabilities - reference


def k3(log_probabilities: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return exp(r - x) - 1 - (r - x), at most K3_LIMIT, in the same shape; differentiable."""
    difference = limited_log_ratio(reference, log_probabilities)
    return (torch.expm1(difference) - difference).clamp(max=K3_LIMIT)


def measured_k3(log_probabilities: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return exp(r - x) - 1 - (r - x) without a limit, float64 in the same shape, for metrics. It is infinite where
    r - x is above 709.8 nats."""
    difference = reference.double() - log_probabilities.double()
    return torch.expm1(difference) - difference


def k2(log_probabilities: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return (x - r)^2 / 2 with x - r within LOG_RATIO_LIMIT, of the same shape; differentiable."""
    return 0.5 * limited_log_ratio(log_probabilities, reference).square()


def divergence(
    estimator: KLEstimator, log_probabilities: torch.Tensor, reference: torch.Tensor, old: torch.Tensor
) -> torch.Tensor:
    """Return the divergence term of each token by an estimator, in the arguments' shape; differentiable.

    `old`: log-probabilities of the sampling policy, which the estimator `Unbiased` reads.
    """
    if estimator == "K1":
        return k1(log_probabilities, reference)
    if estimator == "K2":
        return k2(log_probabilities, reference)
    plain = k3(log_probabilities, reference)
    return plain if estimator == "K3" else torch.exp(limited_log_ratio(log_probabilities, old)) * plain


def sequence_kl(log_probabilities: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the mean over responses of k1 summed over their tokens, in nats; responses without tokens do not count."""
    total = (k1(log_probabilities.double(), reference.double()) * mask).sum()
    return float(total / mask.any(dim=1).sum().clamp(min=1))


def token_kl(log_probabilities: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the mean of k1 over the tokens of `mask`, in nats."""
    total = (k1(log_probabilities.double(), reference.double()) * mask).sum()
    return float(total / mask.sum().clamp(min=1))


def adapted_coefficient(coefficient: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """Return the next KL coefficient: proportional control towards `target` (nats per response).

    It changes by the relative error, within ERROR_LIMIT, x `samples` / `horizon`. A NaN divergence does not change it.
    """
    if math.isnan(kl):
        return coefficient
    error = min(max(kl / target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
    return coefficient * (1.0 + error * samples / horizon)
