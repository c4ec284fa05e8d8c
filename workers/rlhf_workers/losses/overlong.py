"""Penalty on the reward of a response close to the maximum length.

Source: Yu et al., "DAPO" (2025), equation 13.
"""

import torch


def overlong_penalty(lengths: torch.Tensor, longest: int, buffer: float, penalty: float) -> torch.Tensor:
    """Return the addition to each response's reward, float64 [B]: max(-p, min(0, -(length - (longest - buffer)) /
    buffer p)).

    `lengths` int [B] and `longest` in tokens; `buffer` above 0: the last tokens over which the penalty grows.
    """
    beyond = lengths.double() - (longest - buffer)
    return (-beyond / buffer * penalty).clamp(max=0.0).clamp(min=-penalty)
