"""Computes one number per response token chunk by chunk, for log-probabilities and values.

Position q scores token q + 1, for q from prompt - 1 on. Rule: with `blocks` a sample is computed alone in the blocks
[0, 64), [64, 128), ... of its positions, the last one padded on the right, and the head is applied to whole blocks.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from rlhf_api.score_blocks import BLOCK
from rlhf_common.samples import TokenArray
from rlhf_workers.devices.host_copies import to_device, wait_for
from rlhf_workers.inference.chunk_forward import ChunkForward
from rlhf_workers.inference.partial_scores import PartialScore

LONGEST_CHUNK: Final = 512
"""Maximum tokens of one sample per pass without blocks."""

Read = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(model outputs [n, ...], next tokens int64 [n]) -> float32 [n]."""


class TokenScores:
    """Advances the prefixes of samples."""

    def __init__(self, forward: ChunkForward, read: Read, device: torch.device, *, blocks: bool) -> None:
        self._forward, self._read, self._device = forward, read, device
        self.blocks = blocks

    def advance(self, prefixes: Sequence[PartialScore], tokens: Sequence[TokenArray], *, ended: bool) -> None:
        """Run one pass that advances each prefix towards the end of its `tokens`, prompt and response; each must have
        tokens left.

        With `blocks`, advance one prefix at a time, and by whole blocks until `ended`.
        """
        counts = [
            self.next_chunk(prefix, sample_tokens, ended)
            for prefix, sample_tokens in zip(prefixes, tokens, strict=True)
        ]
        width = BLOCK if self.blocks else max(counts)
        ids = np.zeros((len(prefixes), width + 1), dtype=np.int64)
        for row, prefix, sample_tokens, count in zip(ids, prefixes, tokens, counts, strict=True):
            row[: count + 1] = sample_tokens[prefix.positions : prefix.positions + count + 1]
        placed = to_device(ids, self._device)
        starts = [prefix.positions for prefix in prefixes]
        said = self._forward(prefixes, placed[:, :-1], [BLOCK] if self.blocks else counts)
        for index, (prefix, sample_tokens, start, count) in enumerate(
            zip(prefixes, tokens, starts, counts, strict=True)
        ):
            end = start + count
            first = max(0, prefix.prompt - 1 - start)
            prefix.tokens = sample_tokens[: end + 1]
            if first >= count:
                continue
            if self.blocks:
                numbers = self._read(said[index], placed[index, 1:])[first:count]
            else:
                numbers = self._read(said[index, first:count], placed[index, first + 1 : count + 1])
            prefix.scores.append(numbers)

    def wait(self) -> None:
        """Wait until the passes are done, so that later work does not queue behind all of them."""
        wait_for(self._device)

    def next_chunk(self, prefix: PartialScore, tokens: TokenArray, ended: bool) -> int:
        """Return how many positions the next pass computes; 0 if it can compute none now."""
        left = len(tokens) - 1 - prefix.positions
        if not self.blocks:
            return max(0, min(left, LONGEST_CHUNK))
        return BLOCK if left >= BLOCK else max(0, left) if ended else 0
