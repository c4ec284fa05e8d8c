"""Draws tokens: one uniform per response position selects a token by the inverse cumulative distribution.

Rule: the uniform of (random key, position) is word `position` of the Philox4x64 stream with that key (Salmon et al.,
SC'11). Must never keep a generator's state between calls.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from rlhf_common.samples import Drawing
from rlhf_workers.generation.engine import SamplingParameters

WORDS_PER_BLOCK: Final = 4
"""64-bit words that one Philox4x64 counter yields."""
PART: Final = 1024
"""Tokens per part of a vocabulary, which a GPU sums in parts."""
MANTISSA: Final = 2.0**-53
"""Spacing of the uniforms: the top 53 bits of a word."""

EVALUATED: Final = 1.0
"""Offset of the uniforms of a request for evaluation."""
GREEDY: Final = -1.0
"""Value in place of the uniforms of a greedy request."""


def uniforms(random_key: int, start: int, count: int) -> npt.NDArray[np.float64]:
    """Return float64 [count] uniforms in [0, 1) for response positions start .. start+count-1.

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

    logits [n, vocabulary] any float, uniform [n] float64 on the same device, `marked` if requests choose how they are
    drawn. Returns tokens [n] int64 and their log-probabilities [n] float32 under softmax(logits / temperature) before
    top-p and top-k; temperature 0 counts as 1. The caller must refuse a row with a non-finite log-probability.
    """
    log_probabilities = torch.log_softmax(scaled(logits, uniform, parameters), dim=-1)
    if not parameters.random:
        tokens = log_probabilities.argmax(dim=-1)
    else:
        draw = _draw if logits.device.type == "cpu" else _draw_by_parts
        weights = _truncate(log_probabilities.double().exp(), parameters)
        tokens = _by_request(log_probabilities, weights, uniform, parameters, draw)
    return tokens, log_probabilities.gather(1, tokens[:, None])[:, 0]


def scaled(logits: torch.Tensor, uniform: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """Return float32 logits [n, vocabulary], each row divided by its temperature (0 counts as 1)."""
    scores = logits.float()
    if parameters.temperature > 0 and parameters.temperature != 1:
        scores = scores / parameters.temperature
    if parameters.evaluation_temperature > 0:
        evaluated = (uniform >= EVALUATED)[:, None]
        scores = torch.where(evaluated, logits.float() / parameters.evaluation_temperature, scores)
    return scores


def marked(drawn: npt.NDArray[np.float64], drawing: Drawing) -> npt.NDArray[np.float64]:
    """Encode in uniforms [n] how their tokens are drawn.

    Unchanged: by the job's rollout. Below 0: greedy. From `EVALUATED` on: by evaluation.
    """
    if drawing is Drawing.GREEDY:
        return np.full_like(drawn, GREEDY)
    return drawn + EVALUATED if drawing is Drawing.EVALUATION else drawn


def _by_request(
    log_probabilities: torch.Tensor,
    weights: torch.Tensor,
    uniform: torch.Tensor,
    parameters: SamplingParameters,
    draw: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return tokens [n]; a rollout row gets the same token for any other rows."""
    if not parameters.by_request:
        return draw(weights, uniform)
    evaluated = uniform >= EVALUATED
    tokens = draw(weights, torch.where(evaluated, uniform - EVALUATED, uniform).clamp_min(0.0))
    greedy = uniform < 0 if parameters.temperature > 0 else ~evaluated
    return torch.where(greedy, log_probabilities.argmax(dim=-1), tokens)


def _truncate(probabilities: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """Return [n, vocabulary] with zeros for tokens removed by top-k, then by top-p; ties go to the lower id."""
    size = probabilities.shape[-1]
    top_k = parameters.top_k if 0 < parameters.top_k < size else size
    if top_k == size and parameters.top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ordered[:, top_k:] = 0
    if parameters.top_p < 1:
        before = ordered.cumsum(dim=-1) - ordered
        ordered.masked_fill_(before >= parameters.top_p * ordered.sum(dim=-1, keepdim=True), 0)
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the row-wise index i with cumulative(i-1) <= uniform * total < cumulative(i); never one of weight zero."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total, right=False)
    return torch.minimum(index, last)[:, 0].clamp_max(weights.shape[-1] - 1)


def _draw_by_parts(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw by the rule of `_draw`: first the part of the vocabulary, then the token within it."""
    size = weights.shape[-1]
    parts = torch.nn.functional.pad(weights, (0, -size % PART)).view(len(weights), -1, PART)
    ends = parts.sum(dim=-1).cumsum(dim=-1)
    aim = uniform[:, None] * ends[:, -1:]
    part = _first_above(ends, aim)
    before = torch.where(part > 0, ends.gather(1, (part - 1).clamp_min(0)), 0.0)
    inside = parts.gather(1, part[:, :, None].expand(-1, 1, PART))[:, 0].cumsum(dim=-1) + before
    return (part * PART + _first_above(inside, aim))[:, 0].clamp_max(size - 1)


def _first_above(cumulative: torch.Tensor, aim: torch.Tensor) -> torch.Tensor:
    """Return [n, 1]: the first index of cumulative [n, m] above aim [n, 1], at most the first that reaches the end."""
    end = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, aim, right=True)
    return torch.minimum(index, torch.searchsorted(cumulative, end, right=False))
