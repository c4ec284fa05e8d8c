"""Attention in packed rows, registered with transformers: a row is a concatenation of samples that do not see each
other.

Rule: a sample is computed as if it were alone, with the same functions on its part of the row. So no score between two
samples is computed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from rlhf_workers.training.stages.pipeline_stage import Attention

PACKED: Final = "sample_lengths"
"""Layer argument for its attention: tokens of each sample of the row."""
PACKED_ROWS: Final[Mapping[Attention, Attention]] = {"eager": "packed_eager", "sdpa": "packed_sdpa"}
"""Attention for padded rows -> attention for packed rows."""
WRITTEN_OUT: Final[Mapping[Attention, Attention]] = {
    "eager": "eager",
    "sdpa": "eager",
    "packed_eager": "packed_eager",
    "packed_sdpa": "packed_eager",
    "context_eager": "context_eager",
    "context_sdpa": "context_eager",
}
"""Attention -> explicit replacement for models that the fused kernel cannot compute."""

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Queries [b, heads, l, width], their keys and values [b, groups, L, width], and the mask of these."""
Parts = Callable[[Part, dict[str, Any]], Iterable[Part]]
"""(inputs of attention, other arguments, from which it removes its own) -> parts whose results are concatenated."""


def repeated(rotation: torch.Tensor, packed: tuple[int, ...]) -> torch.Tensor:
    """Return rotations [1, L, width] of a row, from those of the first positions, [1, at least the longest sample,
    width]."""
    return torch.cat([rotation[:, :length] for length in packed], dim=1)


def in_parts(attend: Any, parts: Parts) -> Any:
    """Return an attention function of transformers that applies another one to each part of its input."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        found = list(parts((query, key, value, attention_mask), arguments))
        results = [attend(module, *part, **arguments)[0] for part in found]
        return results[0] if len(results) == 1 else torch.cat(results, dim=1), None

    return attention


def _samples(part: Part, arguments: dict[str, Any]) -> Iterator[Part]:
    """Yield the samples of a packed row; the whole input if no lengths are given."""
    query, key, value, mask = part
    lengths = arguments.pop(PACKED, None)
    if lengths is None:
        yield part
        return
    # A mask depends only on the distance, so that of a shorter sample is a corner of the longest one's.
    masks = [None if mask is None else mask[..., :length, :length] for length in lengths]
    yield from zip(*(whole.split(lengths, dim=2) for whole in (query, key, value)), masks, strict=True)


# Explicit attention works for every family, including its soft cap.
AttentionInterface.register("packed_eager", in_parts(eager_attention_forward, _samples))
AttentionInterface.register("packed_sdpa", in_parts(sdpa_attention_forward, _samples))
