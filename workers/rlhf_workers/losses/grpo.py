"""Group-relative advantages: a response is judged against the other responses to its prompt.

Owns the advantage of a sample and the weight of a token in the loss. An abstained sample is in no mean, in no standard
deviation and in no weight. Source: Shao et al., "DeepSeekMath" (2024), section 4.1.
"""

from typing import Final

import torch

STANDARD_DEVIATION_FLOOR: Final = 1e-6
"""Added to a group's standard deviation; a group whose rewards are all equal then has advantage 0, not 0/0."""


def group_advantages(rewards: torch.Tensor, groups: torch.Tensor, valid: torch.Tensor, scale: bool) -> torch.Tensor:
    """Return the advantage of each sample, float32 [B]: its reward minus its group's mean.

    `scale` divides it by the group's deviation.

    `rewards` float [B] (anything where not valid), `groups` int [B] (any ids), `valid` bool [B]. The deviation is the
    sample one (n - 1); a group with fewer than two valid samples has nothing to compare and gets 0.
    """
    _, group = torch.unique(groups, return_inverse=True)
    count = int(group.max()) + 1 if len(group) else 0
    weight = valid.double()
    reward = torch.where(valid, rewards.double(), 0.0)

    def total(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.float64, device=values.device).index_add(0, group, values)

    size = total(weight)
    centred = (reward - (total(reward) / size.clamp(min=1))[group]) * weight
    if scale:
        deviation = (total(centred.square()) / (size - 1).clamp(min=1)).sqrt()
        centred = centred / (deviation[group] + STANDARD_DEVIATION_FLOOR)
    return torch.where(size[group] > 1, centred, 0.0).float()


def token_mean_weights(mask: torch.Tensor) -> torch.Tensor:
    """Return weights [B, T] by which a sum over tokens is their mean over `mask`; all zero when it has no token."""
    return mask.float() / mask.sum().clamp(min=1)


def sequence_mean_weights(mask: torch.Tensor) -> torch.Tensor:
    """Return weights [B, T] that average over the tokens of a response, then over the responses with any token."""
    lengths = mask.sum(dim=1, keepdim=True)
    responses = (lengths > 0).sum().clamp(min=1)
    return mask.float() / (lengths.clamp(min=1) * responses)
