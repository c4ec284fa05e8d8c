"""Rewards per token, generalised advantage estimation, and whitening.

Owns the computation of per-token advantages and returns from a sample's single reward, in float64 over the whole batch
at once.

Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2016), eq. 16;
the KL term in the reward: Ouyang et al., "Training language models to follow instructions with human feedback" (2022).
"""

from typing import Final

import numpy as np
import torch

VARIANCE_FLOOR: Final = 1e-8
"""Term added to the variance before its root, so that equal values become 0, not NaN."""


def token_rewards(rewards: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return the reward of each token, float64 [B, T], zero outside `mask`: -coefficient x `kl` [B, T], plus `rewards`
    [B] at the last token of `mask`."""
    result = -coefficient * kl.double() * mask
    rows = torch.nonzero(mask.any(dim=1)).squeeze(1)
    last = mask.shape[1] - 1 - mask[rows].flip(1).int().argmax(dim=1)
    result[rows, last] += rewards.double()[rows]
    return result


def advantages_and_returns(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), float32 [B, T], zero outside `mask`.

    A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, with V = A = 0 after the last token, also
    of a response that was cut. Returns are advantages + values. Holes of a response, tokens that an environment wrote,
    are skipped as if the policy's next token followed directly.
    """
    value = values.double() * mask
    # By position, with NumPy: a step has few numbers, for which a PyTorch operation costs more.
    ours = np.ascontiguousarray(mask.cpu().numpy().T)
    reward_at = np.ascontiguousarray((rewards.double() * mask).cpu().numpy().T)
    value_at = np.ascontiguousarray(value.cpu().numpy().T)
    at = np.zeros_like(value_at)
    following, next_value = np.zeros(value.shape[0]), np.zeros(value.shape[0])
    for t in reversed(range(len(at))):
        delta = reward_at[t] + gamma * next_value - value_at[t]
        np.copyto(following, delta + gamma * gae_lambda * following, where=ours[t])
        np.copyto(at[t], following, where=ours[t])
        np.copyto(next_value, value_at[t], where=ours[t])
    advantages = torch.from_numpy(np.ascontiguousarray(at.T)).to(value.device)
    return advantages.float(), ((advantages + value) * mask).float()


def discounted_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return G_t = r_t + gamma G_{t+1} of each token, float32 [B, T], zero outside `mask`; arguments as above."""
    advantages, _ = advantages_and_returns(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    return advantages


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values` shifted and scaled to mean 0 and (population) variance 1 over `mask`, float32; zero elsewhere.

    Equal values become 0. VARIANCE_FLOOR makes the variance slightly smaller than 1.
    """
    chosen = values.double()[mask]
    if chosen.numel() == 0:
        return torch.zeros_like(values, dtype=torch.float32)
    mean = chosen.mean()
    scale = torch.rsqrt(chosen.var(correction=0) + VARIANCE_FLOOR) if chosen.numel() > 1 else 1.0
    return ((values.double() - mean) * scale * mask).float()
