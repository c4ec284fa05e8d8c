"""Attention on a rank that has some positions of every sample, chunk by chunk.

Owns the rule that a query sees the keys of its own sample up to itself, on whichever rank they were computed. A layer
gathers keys and values of all positions in one exchange. Must never make a mask of whole rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from rlhf_workers.models.precision import as_multiplied
from rlhf_workers.training.parallel.context_group import ContextCut, SampleChunk
from rlhf_workers.training.stages.packed_attention import Part, in_parts
from rlhf_workers.training.stages.pipeline_stage import Attention

CONTEXT: Final = "context_cut"
"""Name of the layers' argument with a `ChunkMasks` for their attention."""
CUT: Final[Mapping[Attention, Attention]] = {"eager": "context_eager", "sdpa": "context_sdpa"}
"""Attention for whole rows, padded or packed -> attention for a rank's positions."""


@dataclass(frozen=True)
class ChunkKeys:
    """The keys to which a chunk of queries attends."""

    keys: slice
    """Range in the sample, from the first key that any query of the chunk sees to the end of the chunk."""
    mask: torch.Tensor
    """Mask of these keys: bool or added to scores, or the fused kernel's own."""


@dataclass(frozen=True)
class ChunkMasks:
    """Inputs of one layer's attention besides queries, keys and values."""

    cut: ContextCut
    chunks: list[SampleChunk]
    """This rank's chunks, two per sample."""
    keys: list[ChunkKeys]
    """Keys of each chunk."""

    @classmethod
    def by_kind(
        cls, cut: ContextCut, windows: Mapping[str, int | None], kernel: str, hidden: torch.Tensor
    ) -> dict[str, "ChunkMasks"]:
        """Return the masks for the layers of each attention kind in `windows`; `kernel`: one of `Attention`."""
        return {kind: cls.for_cut(cut, window, kernel.endswith("eager"), hidden) for kind, window in windows.items()}

    @classmethod
    def for_cut(cls, cut: ContextCut, window: int | None, eager: bool, hidden: torch.Tensor) -> "ChunkMasks":
        """Return the masks for one window. `window`: most keys that a query sees, including its own; None: no limit. A
        mask that is added to scores has the type of `hidden`.
        """
        chunks = cut.own_chunks
        by_chunk: dict[SampleChunk, ChunkKeys] = {}
        for chunk in chunks:
            if chunk not in by_chunk:
                first = 0 if window is None else max(0, chunk.start - window + 1)
                keys = slice(first, chunk.start + chunk.length)
                by_chunk[chunk] = ChunkKeys(keys, _mask(chunk, first, window, eager, hidden))
        return cls(cut, chunks, [by_chunk[chunk] for chunk in chunks])

    def parts(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[Part]:
        """Yield (queries, keys, values, mask) per chunk of this rank, from query [b, heads, l, width], key and value
        [b, groups, l, width]. All ranks of the group must call this together.
        """
        packed = as_multiplied(torch.cat((key, value), dim=1))
        keys, values = self.cut.whole(packed).chunk(2, dim=1)
        queries = as_multiplied(query).split([chunk.length for chunk in self.chunks], dim=2)
        # Cut by sample first: autograd then joins the gradients of a row's parts once, not a whole row per part.
        lengths = self.cut.lengths
        of_samples = list(zip(keys.split(lengths, dim=2), values.split(lengths, dim=2), strict=True))
        for number, (own, seen) in enumerate(zip(queries, self.keys, strict=True)):
            of_keys, of_values = of_samples[number // 2]
            yield own, of_keys[:, :, seen.keys], of_values[:, :, seen.keys], seen.mask


def _mask(chunk: SampleChunk, first: int, window: int | None, eager: bool, hidden: torch.Tensor) -> torch.Tensor:
    end = chunk.start + chunk.length
    if not eager and (window is None or window >= end):
        fused: torch.Tensor = causal_lower_right(chunk.length, end - first)
        return fused
    queries = torch.arange(chunk.start, end, device=hidden.device)
    distance = queries[:, None] - torch.arange(first, end, device=hidden.device)
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if not eager:
        return seen[None, None]
    scores = torch.zeros(distance.shape, device=hidden.device, dtype=hidden.dtype)
    return scores.masked_fill_(~seen, torch.finfo(hidden.dtype).min)[None, None]


def _chunks(part: Part, arguments: dict[str, Any]) -> Iterator[Part]:
    """Yield the chunks of a rank's queries, with the visible keys of all ranks."""
    masks: ChunkMasks = arguments.pop(CONTEXT)
    query, key, value, _ = part
    yield from masks.parts(query, key, value)


AttentionInterface.register("context_eager", in_parts(eager_attention_forward, _chunks))
AttentionInterface.register("context_sdpa", in_parts(sdpa_attention_forward, _chunks))
