"""Caches of samples that wait for their environment after a turn, so that they continue without recomputation.

Rule: a cache is stored apart from the pools, so a waiting sample uses no slot. A cache is used once, and only for the
tokens it was computed from.
"""

from typing import NamedTuple

import numpy as np

from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.generation.torch_engine.kv_cache import KvPool, PromptCache


class CachedTurn(NamedTuple):
    """Cached turn of one sample."""

    sequence: TokenArray
    """Prompt and response until the turn's end, int32 [n]."""
    states: PromptCache
    """Cache of all tokens but the last, which is fed next; [1, heads, n - 1, size] per layer."""

    @property
    def position(self) -> int:
        """Position in the sequence of the next token to feed."""
        return len(self.sequence) - 1


class TurnCache:
    """Cached turns of one engine."""

    def __init__(self, most: int, *, replays: bool) -> None:
        """Store at most `most` caches.

        `replays`: without its cache a sample decodes its response tokens again; otherwise they are prefilled.
        """
        self._most = most
        self._replays = replays
        self._kept: dict[SampleKey, CachedTurn] = {}

    def keep(self, key: SampleKey, sequence: TokenArray, pool: KvPool, row: int) -> None:
        """Copy the cache in a pool row of a sample whose turn ended with the last token of `sequence` [n]."""
        states, stop = PromptCache(), len(sequence) - 1
        for layer, parts in pool.storage.items():
            keys, values = (part[row : row + 1, :, :stop].clone() for part in parts)
            states.states[layer] = keys, values
        self.drop(key)
        self._kept[key] = CachedTurn(sequence.copy(), states)
        if len(self._kept) > self._most:
            self.drop(next(iter(self._kept)))

    def fits(self, request: SampleRequest) -> bool:
        """Return whether a sample can continue with its cache: it must have these tokens and an answer after them.

        The answer is decoded, so it must not be longer than they are if prefill is the alternative.
        """
        cached = self._kept.get(request.key)
        if cached is None:
            return False
        own, length = len(cached.sequence), len(request.prompt) + len(request.tokens)
        if length <= own or (length > 2 * own and not self._replays):
            return False
        return bool(np.array_equal(cached.sequence, np.concatenate([request.prompt, request.tokens])[:own]))

    def take(self, key: SampleKey) -> CachedTurn:
        """Remove and return the cache of a sample that `fits`."""
        return self._kept.pop(key)

    def drop(self, key: SampleKey) -> None:
        """Drop the cache of a sample."""
        self._kept.pop(key, None)

    def clear(self) -> None:
        """Drop all caches."""
        self._kept.clear()
