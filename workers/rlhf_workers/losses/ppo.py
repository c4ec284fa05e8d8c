"""Clipped policy and value losses, one value per token; the caller applies weights and sums.

Rule: no function here averages, so weights from the whole mini-batch make the gradient independent of its split, except
for rounding. No finite log-ratio gives an infinite or NaN importance ratio.

Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; the clipped value is from its code
release; the dual clip: Ye et al., "Mastering Complex Control in MOBA Games" (2020), eq. 7.
"""

from typing import Final, NamedTuple

import torch

LOG_RATIO_LIMIT: Final = 20.0
"""Limit in nats; exp overflows float32 at 88.7."""


class PolicyLoss(NamedTuple):
    """Per-token result of a policy-gradient surrogate, each [n]."""

    loss: torch.Tensor
    clipped_low: torch.Tensor
    """True for tokens clipped at the lower end; with the clipped surrogate they have no gradient."""
    clipped_high: torch.Tensor
    """True for tokens clipped at the upper end, or by the dual clip."""

    @property
    def clipped(self) -> torch.Tensor:
        """True for tokens clipped at either end, bool [n]."""
        return self.clipped_low | self.clipped_high


def limited_log_ratio(log_probabilities: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the difference within LOG_RATIO_LIMIT, so that its exponential is finite; beyond the limit the gradient is
    0."""
    return (log_probabilities - others).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def policy_loss(
    log_probabilities: torch.Tensor,
    old_log_probabilities: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Return -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) of each token; tensors are [n].

    `dual_clip`: ratio at which the loss stops growing where A < 0; None: no limit.
    """
    ratio = torch.exp(limited_log_ratio(log_probabilities, old_log_probabilities))
    return clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    """Return the clipped surrogate of each token from any ratio, such as one per response; tensors are [n]."""
    plain = -ratio * advantages
    limited = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss, clipped = torch.maximum(plain, limited), limited.detach() > plain.detach()
    low, high = clipped & (advantages < 0), clipped & (advantages > 0)
    if dual_clip is not None:
        flat = (advantages < 0) & (ratio.detach() > dual_clip)
        loss, high = torch.where(flat, -dual_clip * advantages, loss), high | flat
    return PolicyLoss(loss, low, high)


class ValueLoss(NamedTuple):
    """Per-token result of the value loss, each [n]."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """True if the value is out of range and the clipped branch is the larger one."""


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float | None
) -> ValueLoss:
    """Return max((V - R)^2, (V_clipped - R)^2) / 2 per token.

    V_clipped is within `clip_range` of the old value. Without a range, return (V - R)^2 / 2.
    """
    plain = (values - returns).square()
    if clip_range is None:
        return ValueLoss(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    limited = old_values + (values - old_values).clamp(-clip_range, clip_range)
    clipped = (limited - returns).square()
    beyond = (values - old_values).abs() > clip_range  # within, the branches differ by the rounding of old + (v - old)
    return ValueLoss(0.5 * torch.maximum(plain, clipped), (beyond & (clipped > plain)).detach())
