"""Clipped policy and value losses, one value a token; the caller weighs and sums them.

Rule: nothing here averages. A weight a token, computed from the whole mini-batch, is what makes the gradient the same
however samples are cut into micro-batches, stages and replicas.
Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; the clipped value is
of its code release.
"""

from typing import NamedTuple

import torch


class PolicyLoss(NamedTuple):
    """Per-token outcome of the clipped surrogate, each [n]."""

    loss: torch.Tensor
    ratio: torch.Tensor
    """New over old probability, detached."""
    clipped: torch.Tensor
    """True where the clipped branch is the one taken, so the token has no policy gradient."""


def policy_loss(
    log_probabilities: torch.Tensor,
    old_log_probabilities: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) of each token; all arguments [n]."""
    ratio = torch.exp(log_probabilities - old_log_probabilities)
    plain = -ratio * advantages
    limited = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return PolicyLoss(torch.maximum(plain, limited), ratio.detach(), limited.detach() > plain.detach())


class ValueLoss(NamedTuple):
    """Per-token outcome of the value loss, each [n]."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """True where the clipped branch is the larger one."""


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float | None
) -> ValueLoss:
    """max((V - R)^2, (V_clipped - R)^2) / 2 a token; V_clipped is within clip_range of the old value, None: plain."""
    plain = (values - returns).square()
    if clip_range is None:
        return ValueLoss(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    limited = old_values + (values - old_values).clamp(-clip_range, clip_range)
    clipped = (limited - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, clipped), (clipped > plain).detach())
