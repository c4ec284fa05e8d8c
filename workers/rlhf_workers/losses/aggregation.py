"""Aggregation of token losses: the weight of each token in the loss of its mini-batch.

Rule: weights come from the whole mini-batch, so that a sum over micro-batches and replicas is the mini-batch's loss.
Tokens outside the mask have weight 0 and are not counted.

Source of the constant length: Liu et al., "Understanding R1-Zero-Like Training" (2025), section 3.2.
"""

import torch


def token_mean_weights(mask: torch.Tensor) -> torch.Tensor:
    """Return weights [B, T] that turn a sum over tokens into their mean over `mask`; all zero if it has no token."""
    return mask.float() / mask.sum().clamp(min=1)


def sequence_mean_weights(mask: torch.Tensor) -> torch.Tensor:
    """Return weights [B, T] that average over the tokens of a response, then over the responses with any token."""
    lengths = mask.sum(dim=1, keepdim=True)
    responses = (lengths > 0).sum().clamp(min=1)
    return mask.float() / (lengths.clamp(min=1) * responses)


def constant_length_weights(mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return weights [B, T], the same for every token of `mask`: 1 / (responses with any token x `length`)."""
    responses = mask.any(dim=1).sum().clamp(min=1)
    return mask.float() / (responses * length)
