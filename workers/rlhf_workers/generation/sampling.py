"""Draws tokens: one uniform a response position, turned into a token by the inverse cumulative distribution.

Rule: the uniform of (random key, position) is word `position` of the Philox4x64 stream with that key (Salmon et al.,
SC'11), so a token depends on the sample and never on batch, order, worker or restarts. Tokens are laid along the
distribution in id order: float noise in the logits moves a token only when the uniform falls within that noise of a
boundary. Must never keep a generator's state between calls.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from rlhf_workers.generation.engine import SamplingParameters

WORDS_PER_BLOCK: Final = 4
"""64-bit words one Philox4x64 counter yields."""
MANTISSA: Final = 2.0**-53
"""Spacing of the uniforms: the top 53 bits of a word."""


def uniforms(random_key: int, start: int, count: int) -> npt.NDArray[np.float64]:
    """Return float64 [count] uniforms in [0, 1) of response positions start .. start+count-1.

    `start` is a multiple of 4.
    """
    if start % WORDS_PER_BLOCK:
        raise ValueError(f"start {start} is not a multiple of {WORDS_PER_BLOCK}")
    stream = np.random.Philox(key=random_key, counter=start // WORDS_PER_BLOCK)
    return (stream.random_raw(count) >> np.uint64(11)).astype(np.float64) * MANTISSA


def sample(
    logits: torch.Tensor, uniform: torch.Tensor, parameters: SamplingParameters
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    logits [n, vocabulary] any float, uniform [n] float64 on the same device; returns tokens [n] int64 and their
    log-probabilities [n] float32 under softmax(logits / temperature) before top-p and top-k (at temperature 1 when
    greedy). A row with a non-finite log-probability is for the caller to refuse.
    """
    scores = logits.float()
    if parameters.temperature > 0 and parameters.temperature != 1:
        scores = scores / parameters.temperature
    log_probabilities = torch.log_softmax(scores, dim=-1)
    if parameters.temperature == 0:
        tokens = log_probabilities.argmax(dim=-1)
    else:
        tokens = _draw(_kept(log_probabilities.double().exp(), parameters), uniform)
    return tokens, log_probabilities.gather(1, tokens[:, None])[:, 0]


def _kept(probabilities: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """[n, vocabulary] with zeros where top-k, then top-p on what is left, remove a token; ties go to the lower id."""
    size = probabilities.shape[-1]
    top_k = parameters.top_k if 0 < parameters.top_k < size else size
    if top_k == size and parameters.top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ordered[:, top_k:] = 0
    if parameters.top_p < 1:
        before = ordered.cumsum(dim=-1) - ordered
        ordered[before >= parameters.top_p * ordered.sum(dim=-1, keepdim=True)] = 0
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Row-wise index i with cumulative(i-1) <= uniform * total < cumulative(i); never one of weight zero."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total, right=False)
    return torch.minimum(index, last)[:, 0].clamp_max(weights.shape[-1] - 1)
