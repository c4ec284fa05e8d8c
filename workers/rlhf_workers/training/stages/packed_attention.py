"""Attention in packed rows, registered with transformers: a row is a concatenation of samples that do not see each
other, or of a prompt and the responses that share it.

Owns the rules that keys are those of the query's own sample and that positions restart with each sample, and the
application of an attention function part by part, here and in `context_attention`. Rule: a sample is computed as if it
were alone, with the same functions on its part of the row. A response to a shared prompt attends to copies of the
prompt's keys, before its own. So no score between two samples is computed, and memory and work grow with the squares of
the samples' lengths, not of the row's. Must never copy a row per sample: parts are cut, and their gradients joined,
once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from rlhf_workers.models.precision import as_multiplied
from rlhf_workers.training.batches.packed_rows import PackedRow
from rlhf_workers.training.stages.pipeline_stage import Attention

PACKED: Final = "packed_row"
"""Layer argument for its attention: `PackedRow`."""
WINDOW: Final = "packed_window"
"""Layer argument beside PACKED: keys that a query sees, including its own; None: all before it."""
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


def repeated(rotation: torch.Tensor, row: PackedRow) -> torch.Tensor:
    """Return rotations [1, L, width] of a row, from those of the first positions, [1, at least the longest sample,
    width]. Every response to a shared prompt begins at the position after the prompt."""
    parts = list[torch.Tensor]()
    for segment in row:
        parts.append(rotation[:, : segment.prompt])
        parts += [rotation[:, segment.prompt : segment.prompt + length] for length in segment.responses]
    return torch.cat(parts, dim=1)


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
    """Yield the samples of a packed row, or its prompts and responses; the whole input without a row."""
    query, key, value, mask = part
    row: PackedRow | None = arguments.pop(PACKED, None)
    window: int | None = arguments.pop(WINDOW, None)
    if row is None:
        yield part
        return
    lengths = [length for segment in row for length in (segment.prompt, *segment.responses)]
    if len(lengths) > len(row):
        key, value = as_multiplied(key), as_multiplied(value)  # copies of a prompt's keys then have fewer bytes
    cuts = zip(*(whole.split(lengths, dim=2) for whole in (query, key, value)), strict=True)
    for segment in row:
        prompt, end = next(cuts), segment.prompt
        # A mask depends only on the distance, so that of a shorter sample is a corner of the longest one's.
        yield *prompt, None if mask is None else mask[..., :end, :end]
        first = 0 if window is None else max(0, end - window + 1)  # no response sees earlier keys
        seen = [states[:, :, first:] for states in prompt[1:]]
        for length in segment.responses:
            own, *added = next(cuts)
            if length:
                keys, values = (torch.cat(pair, dim=2) for pair in zip(seen, added, strict=True))
                stop = end + length
                fused = causal_lower_right(length, stop - first) if mask is None else mask[..., end:stop, first:stop]
                yield own, keys, values, fused


# Explicit attention works for every family, including its soft cap.
AttentionInterface.register("packed_eager", in_parts(eager_attention_forward, _samples))
AttentionInterface.register("packed_sdpa", in_parts(sdpa_attention_forward, _samples))
