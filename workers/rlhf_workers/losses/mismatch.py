"""Correction of the mismatch between the engine that sampled and the ranks that train.

With o = log p(token) from the training ranks before the first step and g = log p(token) from the engine, tokens are
samples of exp(g), not of exp(o). The ratio exp(o - g), truncated or masked, or a mask from it, corrects this in the
policy loss as a factor without a gradient.

Sources: truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training", 2025); masks by token, IcePop (Ling team, 2025); masks by sequence (Liu et al., "When Speed Kills Stability",
2025, and TRL).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from rlhf_api.algorithms.mismatch import MismatchCorrection
from rlhf_workers.losses.kl import measured_k3
from rlhf_workers.losses.ppo import LOG_RATIO_LIMIT, limited_log_ratio


class Correction(NamedTuple):
    """Weights of n tokens in the policy loss."""

    weights: torch.Tensor
    """float32 [n], without a gradient."""
    outside: torch.Tensor
    """bool [n]: whether the ratio of the token, or of its response, is outside the limits and was truncated or
    masked."""


def correction(
    old: torch.Tensor, sampled: torch.Tensor, samples: torch.Tensor, count: int, fields: MismatchCorrection
) -> Correction:
    """Return the weights of n tokens of `count` responses, which must have all tokens of a response.

    `old` [n] from the training ranks, `sampled` [n] from the engine, both natural logs; `samples` int64 [n]: the
    response of each token, 0 .. count - 1.
    """
    old, sampled = old.detach(), sampled.detach()
    if fields.mode == "Disabled":
        return Correction(torch.ones_like(old), torch.zeros_like(old, dtype=torch.bool))
    low, high = fields.limits
    if fields.mode in ("Truncate", "Mask"):
        ratio = torch.exp(limited_log_ratio(old, sampled))
    else:
        ratio = _of_responses(old, sampled, samples, count, mean=fields.mode == "GeometricMask")
    outside = ~((ratio >= low) & (ratio <= high))
    if fields.mode == "Truncate":
        return Correction(ratio.clamp(low, high), outside)
    factors = torch.ones_like(ratio) if fields.mode == "GeometricMask" else ratio
    return Correction(factors.masked_fill(outside, 0.0), outside)


def _of_responses(
    old: torch.Tensor, sampled: torch.Tensor, samples: torch.Tensor, count: int, mean: bool
) -> torch.Tensor:
    """Return for each token [n] the ratio of its whole response: the product over its tokens, or their geometric
    mean."""
    difference = limited_log_ratio(old, sampled).double()
    total = difference.new_zeros(count).index_add(0, samples, difference)
    if mean:
        tokens = difference.new_zeros(count).index_add(0, samples, torch.ones_like(difference))
        total = total / tokens.clamp(min=1)
    return torch.exp(total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))[samples].float()


def mismatch_metrics(
    old: torch.Tensor,
    sampled: torch.Tensor,
    samples: torch.Tensor,
    count: int,
    fields: MismatchCorrection,
    stale: torch.Tensor | None = None,
) -> Mapping[str, float]:
    """Return the difference between both over the n tokens of a batch, and the mean effect of the correction.

    Arguments are as for `correction`. `stale` [n]: tokens sampled with other weights, which are excluded from the
    differences; the result is empty without other tokens. Differences are in nats per token: the mean and the maximum
    of |o - g|, and the mean of exp(o - g) - 1 - (o - g), an estimate of KL(engine || trainer).
    """
    corrected = correction(old, sampled, samples, count, fields)
    if stale is not None:
        old, sampled = old[~stale], sampled[~stale]
    if not len(old):
        return {}
    difference = (old - sampled).double().abs()
    return {
        "mismatch": float(difference.mean()),
        "mismatch_max": float(difference.max()),
        "mismatch_kl": float(measured_k3(sampled, old).mean()),
        "mismatch_corrected": float(corrected.outside.double().mean()),
        "mismatch_weight": float(corrected.weights.double().mean()),
    }
