"""Group-relative advantages: a response is compared with the responses to its prompt.

An abstained sample is in no mean and in no standard deviation.

Source: Shao et al., "DeepSeekMath" (2024), section 4.1; without the deviation: Liu et al., "Understanding R1-Zero-Like
Training" (2025), section 3.2; leave-one-out: Ahmadian et al., "Back to Basics" (2024), section 3.
"""

from typing import Final

import torch

STANDARD_DEVIATION_FLOOR: Final = 1e-6
"""Term added to a group's standard deviation; a group with equal rewards then has advantages of about 0, not 0/0."""


def group_advantages(rewards: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor, scale: bool) -> torch.Tensor:
    """Return the advantage of each sample, float32 [B]: its reward minus its group's mean; `scale` divides it by the
    group's deviation.

    `rewards` float [B] (any value where not valid), `groups` int [B] (any ids), `valid` bool [B]. The deviation is the
    sample deviation (n - 1); a group with fewer than two valid samples gets 0.
    """
    centred, size, group = _centred(rewards, groups, valid)
    if scale:
        deviation = (_totals(centred.square(), group) / (size - 1).clamp(min=1)).sqrt()
        centred = centred / (deviation[group] + STANDARD_DEVIATION_FLOOR)
    return torch.where(size[group] > 1, centred, 0.0).float()


def leave_one_out_advantages(rewards: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return the advantage of each sample, float32 [B]: its reward minus the mean of its group's other valid samples.

    That is (reward - mean of the group) G / (G - 1) for G valid samples; a single one gets 0.
    """
    centred, size, group = _centred(rewards, groups, valid)
    return torch.where(size[group] > 1, centred * (size / (size - 1).clamp(min=1))[group], 0.0).float()


def _centred(
    rewards: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (float64 [B]: reward minus mean of the group, 0 where not valid; float64 [groups]: valid samples per
    group; int64 [B]: index of the group)."""
    _, group = torch.unique(groups, return_inverse=True)
    weight = valid.double()
    reward = torch.where(valid, rewards.double(), 0.0)
    size = _totals(weight, group)
    return (reward - (_totals(reward, group) / size.clamp(min=1))[group]) * weight, size, group


def _totals(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    count = int(group.max()) + 1 if len(group) else 0
    return torch.zeros(count, dtype=torch.float64, device=values.device).index_add(0, group, values)
