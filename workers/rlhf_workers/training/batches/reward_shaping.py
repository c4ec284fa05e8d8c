"""What rewards become before advantages are made of them: normalised, scaled, bounded, less what truncation costs.

Everything here is a function of the whole batch, which every rank has, so all ranks come to the same bits. In the order
of `spec.rewardShaping`: combine, scale, bounds, normalize, penalties, and what becomes of responses that were cut.
Rule: samples that abstained, and truncated ones that are filtered, are in no statistic; with the defaults the batch is
returned as it is.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from rlhf_api.algorithms.combination import Combination, Combine
from rlhf_api.job.reward_shaping import RewardShaping
from rlhf_workers.losses.overlong import overlong_penalty
from rlhf_workers.training.batches.training_batch import TrainingBatch

EPSILON = 1e-8
"""Added to standard deviations: a batch of equal rewards becomes 0, not NaN."""


def shaped(
    batch: TrainingBatch, shaping: RewardShaping, combination: Combination | None, max_response_tokens: int
) -> tuple[TrainingBatch, dict[str, float]]:
    """Return the batch with its rewards shaped, and metrics of what was done; none where nothing was asked for."""
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
    return replace(batch, rewards=rewards, unshaped=batch.rewards), metrics


def normalized_sum(parts: Mapping[str, torch.Tensor], combination: Combination, valid: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum, float64 [B], of rewards by name, float32 [B] with NaN where one abstained, each
    normalised over those samples of the batch that have it."""
    total = torch.zeros(len(valid), dtype=torch.float64)
    for name, weight in combination.weights:
        values = parts[name].double()
        there = valid & ~values.isnan()
        total += weight * torch.where(there, normalized(values, there), 0.0)
    return total


def normalized(values: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return values [B] with mean 0 and standard deviation 1 over those that are `there`, bool [B]; all 0 where they
    are equal."""
    own = values[there]
    if not len(own):
        return values
    return (values - own.mean()) / (own.std(correction=0) + EPSILON)


def overlong(lengths: torch.Tensor, shaping: RewardShaping, max_response_tokens: int) -> torch.Tensor:
    """Return what is added, float64 [B], for lengths int64 [B]; nothing without a buffer."""
    if not shaping.overlong_buffer:
        return torch.zeros(len(lengths), dtype=torch.float64)
    return overlong_penalty(lengths, max_response_tokens, shaping.overlong_buffer, shaping.overlong_penalty)


def _share(chosen: torch.Tensor, valid: torch.Tensor) -> float:
    """Return the share, 0..1, of the samples that count; 0 where none does."""
    return float((chosen & valid).sum()) / max(1, int(valid.sum()))
