"""Shapes rewards before advantages are computed, in this order: combine, scale, bounds, normalize, penalties, truncated
responses.

Rule: samples that abstained, and truncated samples that are filtered, are in no mean, deviation or share.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from rlhf_api.algorithms.combination import Combination, Combine
from rlhf_api.job.reward_shaping import RewardShaping
from rlhf_workers.losses.overlong import overlong_penalty
from rlhf_workers.training.batches.training_batch import TrainingBatch

EPSILON = 1e-8
"""Term added to standard deviations: a batch of equal rewards becomes about 0, not NaN."""


def shaped(
    batch: TrainingBatch, shaping: RewardShaping, combination: Combination | None, max_response_tokens: int
) -> tuple[TrainingBatch, dict[str, float]]:
    """Return the batch with shaped rewards, and metrics of the shaping; no metrics if no shaping is configured."""
    if shaping.changes_nothing:
        return batch, {}
    rewards, metrics = batch.rewards.double(), {}
    counted = batch.valid & batch.finished if shaping.truncated == "Filter" else batch.valid
    if combination is not None and combination.method is Combine.NORMALIZED_SUM:
        rewards = normalized_sum(batch.parts, combination, counted)
    rewards = rewards * shaping.scale
    least, most = shaping.minimum, shaping.maximum
    if least is not None or most is not None:
        bounded = rewards.clamp(least, most)
        metrics["shaping/bounded"] = _share(bounded != rewards, counted)
        rewards = bounded
    if shaping.normalize == "Batch":
        rewards = normalized(rewards, counted)
    penalty = overlong(batch.response_lengths, shaping, max_response_tokens)
    if shaping.overlong_buffer:
        metrics["shaping/overlong"] = _share(penalty < 0, counted)
    rewards = rewards + penalty - shaping.missing_end_penalty * (~batch.finished).double()
    rewards = torch.where(counted, rewards, torch.zeros_like(rewards)).float()
    cut = ~batch.finished & batch.valid
    if shaping.truncated == "Mask":
        metrics["shaping/masked"] = float(cut.sum())
        batch = replace(batch, mask=batch.mask & batch.finished[:, None])
    elif shaping.truncated == "Filter":
        metrics["shaping/filtered"] = float(cut.sum())
        batch = replace(batch, mask=batch.mask & counted[:, None], valid=counted)
    return replace(batch, rewards=rewards), metrics


def normalized_sum(parts: Mapping[str, torch.Tensor], combination: Combination, valid: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum, float64 [B], of rewards by name, float32 [B] with NaN for abstentions.

    A reward is normalised over the `valid` samples that have it.
    """
    total = torch.zeros(len(valid), dtype=torch.float64)
    for name, weight in combination.weights:
        values = parts[name].double()
        there = valid & ~values.isnan()
        total += weight * torch.where(there, normalized(values, there), 0.0)
    return total


def normalized(values: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return values [B] with mean 0 and standard deviation about 1 over the samples in `there`, bool [B]; about 0 there
    if they are equal. Without such samples, return them unchanged.
    """
    own = values[there]
    if not len(own):
        return values
    return (values - own.mean()) / (own.std(correction=0) + EPSILON)


def overlong(lengths: torch.Tensor, shaping: RewardShaping, max_response_tokens: int) -> torch.Tensor:
    """Return the additions to rewards, float64 [B], for lengths int64 [B]; 0 without a buffer."""
    if not shaping.overlong_buffer:
        return torch.zeros(len(lengths), dtype=torch.float64)
    return overlong_penalty(lengths, max_response_tokens, shaping.overlong_buffer, shaping.overlong_penalty)


def _share(chosen: torch.Tensor, valid: torch.Tensor) -> float:
    """Return the share, 0..1, of `chosen` among the `valid` samples; 0 without valid samples."""
    return float((chosen & valid).sum()) / max(1, int(valid.sum()))
