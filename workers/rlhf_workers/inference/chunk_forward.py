"""Runs a model over the next tokens of several samples, on top of their stored keys and values.

Rule: a key is stored at its token's position. Must never depend on the cache's own idea of length.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from transformers.cache_utils import Cache

from rlhf_workers.devices.host_copies import to_device
from rlhf_workers.models.attention_masks import AttentionMasks

log = logging.getLogger(__name__)

TRIAL_CHUNKS: Final = (5, 1, 10)
"""Tokens of the passes that try out a model."""
TOLERANCE: Final = 2e-2
"""Relative difference from one whole pass that is allowed."""

Layer = tuple[torch.Tensor, torch.Tensor]


@dataclass
class ComputedTokens:
    """Keys and values of a sample's first tokens under one model."""

    positions: int = 0
    """Number of tokens that have passed through the model."""
    layers: list[Layer] = field(default_factory=list)
    """Keys and values of each layer: [1, heads, positions, size]."""

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(part.numel() * part.element_size() for layer in self.layers for part in layer)


class _Pass(Cache):  # type: ignore[misc]
    """The key-value cache of one forward pass."""

    def __init__(self, before: Sequence[ComputedTokens], counts: Sequence[int]) -> None:
        super().__init__(layers=[])
        self._before = before
        self._ends = [row.positions + count for row, count in zip(before, counts, strict=True)]
        self.length = max(self._ends)
        """Number of keys that are read."""
        self.layers_after: list[Layer] = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Layer:
        """Append [rows, heads, width, size] states; return [rows, heads, length, size]."""
        old = [row.layers[layer_idx] if row.layers else None for row in self._before]
        both = tuple(
            self._appended(states, [None if row is None else row[part] for row in old])
            for part, states in enumerate((key_states, value_states))
        )
        self.layers_after.append((both[0], both[1]))
        return both[0], both[1]

    def _appended(self, new: torch.Tensor, old: Sequence[torch.Tensor | None]) -> torch.Tensor:
        if len(old) == 1:
            return new if old[0] is None else torch.cat([old[0], new], dim=2)
        joined = new.new_zeros(new.shape[0], new.shape[1], self.length, new.shape[3])
        for row, (before, end) in enumerate(zip(self._before, self._ends, strict=True)):
            previous = old[row]
            if previous is not None:
                joined[row, :, : before.positions] = previous[0]
            joined[row, :, before.positions : end] = new[row, :, : end - before.positions]
        return joined

    def row(self, index: int) -> list[Layer]:
        """Return a row's keys and values after the pass, copied if the pass was shared."""
        if len(self._ends) == 1:
            return self.layers_after
        end, rows = self._ends[index], slice(index, index + 1)
        return [(keys[rows, :, :end].clone(), values[rows, :, :end].clone()) for keys, values in self.layers_after]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are explicit."""
        return 0


class ChunkForward:
    """Runs a model, or its backbone, over chunks."""

    def __init__(self, model: Any, config: Any, dtype: torch.dtype, result: str) -> None:
        """`model` takes transformers' arguments and computes in `dtype`; `config` is the configuration of its text
        part.

        `result` names the field of its output to return.
        """
        self._model, self._result = model, result
        self._vocabulary = int(config.vocab_size)
        self._masks = AttentionMasks(config, dtype)

    @torch.inference_mode()
    def __call__(self, rows: Sequence[ComputedTokens], ids: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return [rows, width, ...], the model's output after each of ids [rows, width].

        The first `counts` ids of each row are its own, and the row grows by them. A single row may be padded on the
        right: it then counts the padding, and must not be used further.
        """
        width, device = ids.shape[1], ids.device
        placed = to_device(np.array([[row.positions for row in rows], counts]), device)
        start, own = placed[0][:, None], placed[1][:, None]
        positions = start + torch.minimum(torch.arange(width, device=device)[None], own - 1)
        cache = _Pass(rows, counts)
        output: torch.Tensor = getattr(
            self._model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=self._masks.for_positions(positions, cache.length),
                past_key_values=cache,
                use_cache=True,
            ),
            self._result,
        )
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            row.layers, row.positions = cache.row(index), row.positions + count
        return output

    @torch.inference_mode()
    def agrees(self) -> bool:
        """Return whether chunks and one pass agree within TOLERANCE; False for unknown layers.

        Also False if the model fails, unless memory runs out.
        """
        if self._masks.unknown:
            return False
        size = sum(TRIAL_CHUNKS)
        ids = (torch.arange(size, device=getattr(self._model, "device", "cpu")) * 7 % self._vocabulary)[None]
        try:
            whole = getattr(self._model(input_ids=ids, use_cache=False), self._result).float()
            row = ComputedTokens()
            parts = [self([row], part, [part.shape[1]]) for part in torch.split(ids, list(TRIAL_CHUNKS), dim=1)]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            log.warning("scored in whole passes only, it does not take our masks: %s", error)
            return False
        off = float((torch.cat(parts, dim=1).float() - whole).abs().max())
        return off <= TOLERANCE * (1 + float(whole.abs().max()))
