"""How the losses of tokens become one number: the weight of each token in the loss of its mini-batch.

Rule: weights come from the whole mini-batch, so that a sum over micro-batches and replicas is the mini-batch's loss.
What is outside the mask, and hence every abstained sample, has weight 0 and is in no count.
Source of the constant length: Liu et al., "Understanding R1-Zero-Like Training" (2025), section 3.2.
"""

import torch


def token_mean_weights(mask: torch.Tensor) -> torch.Tensor:
    """Return weights [B, T] by which a sum over tokens is their mean over `mask`; all zero when it has no token."""
    return mask.float() / mask.sum().clamp(min=1)


def sequence_mean_weights(mask: torch.Tensor) -> torch.Tensor:
    """Return weights [B, T] that average over the tokens of a response, then over the responses with any token."""
    lengths = mask.sum(dim=1, keepdim=True)
    responses = (lengths > 0).sum().clamp(min=1)
    return mask.float() / (lengths.clamp(min=1) * responses)


def constant_length_weights(mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return weights [B, T], the same for every token: 1 / (responses with any token x `length`).

    A long response then weighs more than a short one, as each of its tokens counts what any other does.
    """
    responses = mask.any(dim=1).sum().clamp(min=1)
    return mask.float() / (responses * length)
