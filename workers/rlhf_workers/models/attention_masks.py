"""Attention masks by kind of layer, as the additive 4D masks that transformers passes through unchanged.

Rule: position p sees key k if k <= p, and with a window if also p - window < k.
"""

from typing import Any, Final

import torch

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


class AttentionMasks:
    """The masks of one model."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        """`config` is the text part of a model's configuration; masks are added to scores of type `dtype`."""
        kinds = _layer_kinds(config)
        self.unknown = tuple(sorted(kinds - {FULL, SLIDING}))
        """Kinds of layers without a known mask; if there are any, `for_positions` must not be called."""
        self.kinds = tuple(sorted(kinds))
        self.window = int(config.sliding_window) if SLIDING in kinds else 0
        self._dtype = dtype
        self._hidden = torch.finfo(dtype).min

    def for_positions(self, positions: torch.Tensor, length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return masks [n, 1, queries, length] for queries at `positions` [n, queries] and keys 0..length-1; if layers
        differ, one per kind of layer.
        """
        keys = torch.arange(length, device=positions.device)
        behind = positions[:, None, :, None] - keys
        shape = (positions.shape[0], 1, positions.shape[1], length)
        masks = {}
        for kind in self.kinds:
            hidden = behind < 0 if kind == FULL else (behind < 0) | (behind >= self.window)
            mask = torch.zeros(shape, dtype=self._dtype, device=positions.device)
            masks[kind] = mask.masked_fill_(hidden, self._hidden)
        return masks if len(masks) > 1 else masks[self.kinds[0]]


def _layer_kinds(config: Any) -> set[str]:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds)
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return {SLIDING} if sliding else {FULL}
