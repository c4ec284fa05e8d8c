"""A reward under a limit on costs: advantages of the Lagrangian, and the ascent of its multiplier.

The problem max E[R] subject to E[C] <= d has the Lagrangian E[R] - lambda (E[C] - d), lambda >= 0. The multiplier is
stored as nu = log lambda, so that no step makes it negative; d(lambda (E[C] - d))/dnu = lambda (E[C] - d) is its
gradient.

Source: Dai et al., "Safe RLHF: Safe Reinforcement Learning from Human Feedback" (2023).
"""

import math
from typing import Final

import torch

MIN_LOG_MULTIPLIER: Final = -30.0
"""Lower bound of nu: a multiplier of about 1e-13."""
MAX_FALL: Final = 1.0
"""Largest fall of nu per step. Steps are proportional to the multiplier, so it rises only slowly from a small value."""


def combined_advantages(rewards: torch.Tensor, costs: torch.Tensor, multiplier: float) -> torch.Tensor:
    """Return (A_R - lambda A_C) / (1 + lambda), in the shape of both."""
    return (rewards - multiplier * costs) / (1.0 + multiplier)


def moved_log_multiplier(log_multiplier: float, excess: float, learning_rate: float, maximum: float) -> float:
    """Return nu + learning_rate * excess * e^nu, from MIN_LOG_MULTIPLIER to the logarithm of `maximum`.

    `excess`: mean cost above the limit; if it is negative, nu falls by at most MAX_FALL.
    """
    moved = log_multiplier + max(learning_rate * excess * math.exp(log_multiplier), -MAX_FALL)
    return max(MIN_LOG_MULTIPLIER, min(moved, math.log(maximum)))
