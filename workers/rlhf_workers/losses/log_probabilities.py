"""Log-probabilities of chosen tokens and entropies from logits, with backward, without a whole float32 copy.

Float32 arrays are computed in chunks of rows, see `row_chunks`. A token with probability 0 (logit -inf, or too small
for float32) adds 0 to the entropy and its gradient: 0 log 0 = 0.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

CHUNK_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of one float32 array over a chunk of several rows."""


def selected_log_probabilities(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log p(token), entropy) of softmax(logits / temperature), both float32 [n], differentiable in `logits`.

    `logits` floating [n, V], `tokens` int64 [n]. Temperature 0 (greedy decoding) means 1.
    """
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _Selected.apply
    return apply(logits, tokens, temperature or 1.0)


def row_chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Yield slices of the rows of logits [n, V] whose float32 copies take `CHUNK_BYTES` at most, or are one row."""
    rows = max(1, CHUNK_BYTES // (4 * max(1, int(logits.shape[-1]))))
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)


class _Selected(torch.autograd.Function):
    """The forward keeps logits, tokens and two numbers per row; the backward recomputes the softmax chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
        count = len(tokens)
        chosen, entropy, norm = (torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(3))
        for part in row_chunks(logits):
            scaled = logits[part].float() if temperature == 1.0 else logits[part].float() / temperature
            norm[part] = torch.logsumexp(scaled, dim=-1)
            chosen[part] = scaled.gather(1, tokens[part, None]).squeeze(1) - norm[part]
            probability = torch.exp(scaled - norm[part, None])
            entropy[part] = norm[part] - (probability * scaled).masked_fill_(probability == 0, 0.0).sum(dim=-1)
        ctx.save_for_backward(logits, tokens, norm, entropy)
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """d log p_k / d z_j = (1[j = k] - p_j) / T;  d H / d z_j = -p_j (log p_j + H) / T, with z the logits."""
        logits, tokens, norm, entropy = ctx.saved_tensors
        for_chosen, for_entropy = gradients
        result = torch.empty_like(logits)
        for part in row_chunks(logits):
            scaled = logits[part].float() if ctx.temperature == 1.0 else logits[part].float() / ctx.temperature
            log_p = scaled - norm[part, None]
            probability = torch.exp(log_p)
            gradient = torch.zeros_like(log_p)
            if for_chosen is not None:
                row = for_chosen[part, None] / ctx.temperature
                gradient = (probability * -row).scatter_add_(1, tokens[part, None], row)
            if for_entropy is not None:
                slope = for_entropy[part, None] / ctx.temperature
                surprise = (log_p + entropy[part, None]).masked_fill_(probability == 0, 0.0)
                gradient -= probability * surprise * slope
            result[part] = gradient
        return result, None, None
