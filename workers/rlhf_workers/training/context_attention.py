"""Attention of a rank that has some positions of every sample, registered with transformers.

Owns that a query sees the keys of its own sample up to itself, whichever rank made them. Keys and values of all
positions are gathered once a layer, in one exchange; each piece of a rank's queries then attends to the keys before its
end, by the same functions as whole samples, so no score is made that a causal mask would throw away but those of a
piece with itself. Must never make a mask of whole rows: that of a piece is made where no kernel has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from rlhf_workers.training.context_group import ContextCut, Piece
from rlhf_workers.training.pipeline_stage import Attention

CONTEXT: Final = "context_cut"
"""Argument of a layer that it passes on to its attention: `PieceMasks`."""
CUT: Final[Mapping[Attention, Attention]] = {"eager": "context_eager", "sdpa": "context_sdpa"}
"""What computes a rank's positions by what computes whole rows, padded or packed."""


@dataclass(frozen=True)
class PieceMasks:
    """What one layer's attention needs beside queries, keys and values."""

    cut: ContextCut
    first_keys: list[int]
    """Of each piece: the first key in its sample that any of its queries sees."""
    masks: list[torch.Tensor]
    """Of each piece, for the keys from there to its end: bool or added to scores, or the fused kernel's own."""

    @classmethod
    def of(cls, cut: ContextCut, window: int | None, eager: bool, hidden: torch.Tensor) -> "PieceMasks":
        """`window`: keys that a query sees, itself among them; None: all before it. Masks are of the type and on the
        device of `hidden`."""
        first = [0 if window is None else max(0, piece.start - window + 1) for piece in cut.pieces]
        made: dict[tuple[Piece, int], torch.Tensor] = {}
        for piece, key in zip(cut.pieces, first, strict=True):
            if (piece, key) not in made:
                made[piece, key] = _mask(piece, key, window, eager, hidden)
        return cls(cut, first, [made[piece, key] for piece, key in zip(cut.pieces, first, strict=True)])


def _mask(piece: Piece, first: int, window: int | None, eager: bool, hidden: torch.Tensor) -> torch.Tensor:
    end = piece.start + piece.length
    if not eager and (window is None or window >= end):
        fused: torch.Tensor = causal_lower_right(piece.length, end - first)
        return fused
    queries = torch.arange(piece.start, end, device=hidden.device)
    distance = queries[:, None] - torch.arange(first, end, device=hidden.device)
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if not eager:
        return seen[None, None]
    scores = torch.zeros(distance.shape, device=hidden.device, dtype=hidden.dtype)
    return scores.masked_fill_(~seen, torch.finfo(hidden.dtype).min)[None, None]


def _by_piece(attend: Any) -> Any:
    """Return an attention function of transformers that applies another to each piece of a rank's queries."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        of_row: PieceMasks = arguments.pop(CONTEXT)
        cut = of_row.cut
        made = torch.cat((key, value), dim=1)
        if torch.is_autocast_enabled(made.device.type):  # as the first product would do: half the bytes on the way
            made = made.to(torch.get_autocast_dtype(made.device.type))
        keys, values = cut.whole(made).chunk(2, dim=1)
        queries = query.split([piece.length for piece in cut.pieces], dim=2)
        # Cut by sample first: the gradients of parts of a row are joined once, not one whole row a part.
        of_samples = list(zip(keys.split(cut.lengths, dim=2), values.split(cut.lengths, dim=2), strict=True))
        results = []
        for number, (piece, first, mask) in enumerate(zip(cut.pieces, of_row.first_keys, of_row.masks, strict=True)):
            seen = slice(first, piece.start + piece.length)
            part = (whole[:, :, seen] for whole in of_samples[number // 2])
            results.append(attend(module, queries[number], *part, mask, **arguments)[0])
        return torch.cat(results, dim=1), None

    return attention


AttentionInterface.register("context_eager", _by_piece(eager_attention_forward))  # every family's, and its soft cap
AttentionInterface.register("context_sdpa", _by_piece(sdpa_attention_forward))
