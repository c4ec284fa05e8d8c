"""Attention in packed rows, registered with transformers: a row is a concatenation of samples that do not see each
other, or of a prompt and the responses that share it.

Rule: a sample is computed as if it were alone, so no score between two samples is computed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
"""Name of the layers' argument with a `RowAttention` for their attention."""
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


@dataclass(frozen=True)
class RowAttention:
    """Inputs of one layer's attention in a packed row besides queries, keys and values."""

    row: PackedRow
    seen: tuple[slice, ...]
    """For each segment, the prompt tokens that any response sees."""
    masks: tuple[torch.Tensor | None, ...]
    """For each segment, the mask [..., longest response, seen tokens and longest response]; None: the fused kernel's
    own mask, or no response.
    """

    @classmethod
    def for_row(
        cls, row: PackedRow, window: int | None, mask: torch.Tensor | None, hidden: torch.Tensor
    ) -> "RowAttention":
        """Return those of layers with one window: keys that a query sees, including its own; None: no limit. `mask`:
        that of the longest sample; None: causal. An added mask has the type of `hidden`.
        """
        seen = tuple(slice(0 if window is None else max(0, part.prompt - window + 1), part.prompt) for part in row)
        causal = dict[tuple[int, int], torch.Tensor | None]()  # segments of one shape share it
        masks = list[torch.Tensor | None]()
        for part, keys in zip(row, seen, strict=True):
            shape = part.longest - part.prompt, part.longest
            if mask is not None or not part.responses:
                masks.append(None if mask is None else mask[..., part.prompt : part.longest, keys.start : part.longest])
                continue
            if shape not in causal:
                causal[shape] = _causal(*shape, hidden)
            masks.append(causal[shape])
        return cls(row, seen, tuple(masks))

    def parts(self, part: Part) -> Iterator[Part]:
        """Yield the samples of the row, or its prompts and responses."""
        query, key, value, mask = part
        lengths = [length for segment in self.row for length in (segment.prompt, *segment.responses)]
        if len(lengths) > len(self.row):
            key, value = as_multiplied(key), as_multiplied(value)  # copies of a prompt's keys then have fewer bytes
        cuts = zip(*(whole.split(lengths, dim=2) for whole in (query, key, value)), strict=True)
        for segment, keys, continued in zip(self.row, self.seen, self.masks, strict=True):
            prompt, end = next(cuts), segment.prompt
            # A mask depends only on the distance, so that of a shorter sample is a corner of the longest one's.
            yield *prompt, None if mask is None else mask[..., :end, :end]
            before = [states[:, :, keys] for states in prompt[1:]]
            for length in segment.responses:
                own, *added = next(cuts)
                if length:
                    of_keys, of_values = (torch.cat(pair, dim=2) for pair in zip(before, added, strict=True))
                    yield own, of_keys, of_values, _corner(continued, length, of_keys.shape[2])


def _causal(queries: int, keys: int, hidden: torch.Tensor) -> torch.Tensor | None:
    """Return the mask [1, 1, queries, keys] of the last queries before the end of the keys; None on a GPU, whose kernel
    has its own.
    """
    if hidden.device.type == "cuda":
        return None
    mask = torch.full((queries, keys), float("-inf"), device=hidden.device, dtype=hidden.dtype)
    return mask.triu_(keys - queries + 1)[None, None]


def _corner(mask: torch.Tensor | None, queries: int, keys: int) -> torch.Tensor:
    """Return the mask of a response."""
    if mask is not None:
        return mask[..., :queries, :keys]
    fused: torch.Tensor = causal_lower_right(queries, keys)
    return fused


def repeated(rotation: torch.Tensor, row: PackedRow) -> torch.Tensor:
    """Return rotations [1, L, width] of a row, from those of the first positions."""
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
    """Yield the parts of a packed row; the whole input without a row."""
    row: RowAttention | None = arguments.pop(PACKED, None)
    yield from (part,) if row is None else row.parts(part)


# Explicit attention works for every family, including its soft cap.
AttentionInterface.register("packed_eager", in_parts(eager_attention_forward, _samples))
AttentionInterface.register("packed_sdpa", in_parts(sdpa_attention_forward, _samples))
