"""REINFORCE weighted by clipped importance ratios, one value per token; the caller applies weights and sums.

Rule: the weight has no gradient, so that a clipped token keeps its own.

Source: MiniMax, "MiniMax-M1" (2025), eq. 4.
"""

import torch

from rlhf_workers.losses.ppo import PolicyLoss, limited_log_ratio


def weighted_policy_loss(
    log_probabilities: torch.Tensor,
    old_log_probabilities: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Return -clip(ratio, 1 - clip_low, 1 + clip_high) A x of each token, without a gradient of the clipped ratio; x is
    the log-probability, tensors are [n]. `clip_low` of 1 or more means no lower bound.
    """
    ratio = torch.exp(limited_log_ratio(log_probabilities.detach(), old_log_probabilities))
    least, most = 1.0 - clip_low, 1.0 + clip_high
    loss = -ratio.clamp(least, most) * advantages * log_probabilities
    return PolicyLoss(loss, ratio < least, ratio > most)
