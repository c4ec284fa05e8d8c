"""From a scored batch to what the losses need: advantages, returns, token weights, and the numbers people watch.

Computed from the whole batch, the same on every rank (small arrays, float64). One function an algorithm; what differs
between algorithms in training is here and in `objectives`, nowhere else.
"""

import torch

from rlhf_api.algorithms.fields import PolicyGradientFields
from rlhf_api.algorithms.grpo import GRPO
from rlhf_api.algorithms.ppo import PPO
from rlhf_workers.losses.gae import advantages_and_returns, token_rewards, whiten
from rlhf_workers.losses.grpo import group_advantages, sequence_mean_weights, token_mean_weights
from rlhf_workers.losses.kl import k1, sequence_kl, token_kl
from rlhf_workers.training.batch import Batch

REFERENCE = "reference_log_probabilities"


def with_advantages(batch: Batch, algorithm: PPO | GRPO, kl_coefficient: float) -> Batch:
    """The batch with `advantages` (and `returns` for a critic), float32 [B, T], zero where masked."""
    if isinstance(algorithm, GRPO):
        of_sample = group_advantages(batch.rewards, batch.groups, batch.valid, algorithm.advantage_scale == "GroupStd")
        return batch.with_fields(advantages=of_sample[:, None] * batch.mask)
    kl = torch.zeros_like(batch.fields["log_probabilities"])
    if algorithm.kl_in == "Reward" and REFERENCE in batch.fields:
        kl = k1(batch.fields["log_probabilities"], batch.fields[REFERENCE])
    rewards = token_rewards(batch.rewards, kl, batch.mask, kl_coefficient)
    advantages, returns = advantages_and_returns(
        rewards, batch.fields["values"], batch.mask, algorithm.gamma, algorithm.gae_lambda
    )
    if algorithm.whiten_advantages:
        advantages = whiten(advantages, batch.mask)
    return batch.with_fields(advantages=advantages, returns=returns)


def token_weights(
    batch: Batch, rows: list[int], algorithm: PolicyGradientFields, models: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Model role -> weight [B, T] of each token in the loss of the mini-batch `rows`; sums to 1, or to 0 if empty."""
    mask = torch.zeros_like(batch.mask)
    mask[rows] = batch.mask[rows]
    sequences = isinstance(algorithm, GRPO) and algorithm.loss_aggregation == "SequenceMean"
    return {model: sequence_mean_weights(mask) if sequences else token_mean_weights(mask) for model in models}


def batch_metrics(batch: Batch) -> dict[str, float]:
    """What the batch itself tells, before any step: rewards, lengths, divergence from the reference, value quality."""
    valid = batch.rewards[batch.valid].double()
    lengths = batch.response_lengths.double()
    metrics = {
        "reward/abstained": float((~batch.valid).sum()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
    }
    if len(valid):  # a batch that abstained throughout has no reward, not a zero one
        metrics |= {"reward/mean": float(valid.mean()), "reward/std": float(valid.std(correction=0))}
    if REFERENCE in batch.fields:
        ours, reference = batch.fields["log_probabilities"], batch.fields[REFERENCE]
        metrics["actor/kl"] = sequence_kl(ours, reference, batch.mask)
        metrics["actor/kl_per_token"] = token_kl(ours, reference, batch.mask)
    if "returns" in batch.fields:
        returns, values = (batch.fields[name][batch.mask].double() for name in ("returns", "values"))
        spread = float(returns.var(correction=0)) if len(returns) else 0.0
        unexplained = float((returns - values).var(correction=0)) if len(returns) else 0.0
        metrics["critic/explained_variance"] = 1.0 - unexplained / spread if spread > 0 else 0.0
        metrics["critic/return_mean"] = float(returns.mean()) if len(returns) else 0.0
    return metrics
