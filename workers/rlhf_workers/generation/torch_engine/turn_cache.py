"""Caches of samples whose turn has ended, until their environment has answered: they go on without being computed anew.

Rule: a cache is kept apart from the pools, so a sample that waits takes no slot and no row of a pass; it is a copy of
the bits, and in deterministic mode a sample that goes on with it has those of one whose cache is computed again. A
cache is given out once, and only for the very tokens that it is of. Must never outlive the weights that computed it,
nor be one of more than the engine has slots: the oldest goes first, and its sample is prefilled as any other.
"""

from typing import NamedTuple

import numpy as np

from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.generation.torch_engine.kv_cache import KvPool, PromptCache


class CachedTurn(NamedTuple):
    """What is kept of one sample."""

    sequence: TokenArray
    """Prompt and response until the turn's end, int32 [n]."""
    states: PromptCache
    """[1, heads, n - 1, size] a layer: of all tokens but the last, which is fed next."""

    @property
    def position(self) -> int:
        """Place in the sequence of the token that is fed next."""
        return len(self.sequence) - 1


class TurnCache:
    """Kept caches of one engine."""

    def __init__(self, most: int, *, replays: bool) -> None:
        """`most` caches are kept at once. `replays`: without its cache a sample would decode all its tokens again; else
        they are prefilled, which takes less for as many tokens."""
        self._most = most
        self._replays = replays
        self._kept: dict[SampleKey, CachedTurn] = {}

    def keep(self, key: SampleKey, sequence: TokenArray, pool: KvPool, row: int) -> None:
        """Copies the cache in a row of a pool, of a sample whose turn has ended with the last token of `sequence`
        [n]."""
        states, stop = PromptCache(), len(sequence) - 1
        for layer, parts in pool.storage.items():
            keys, values = (part[row : row + 1, :, :stop].clone() for part in parts)
            states.states[layer] = keys, values
        self.drop(key)
        self._kept[key] = CachedTurn(sequence.copy(), states)
        if len(self._kept) > self._most:
            self.drop(next(iter(self._kept)))

    def fits(self, request: SampleRequest) -> bool:
        """Return whether a sample goes on with what is kept of it: it has these tokens and an answer behind them, and
        the answer, which is fed to decode passes, is no longer than they where prefilling would do instead."""
        kept = self._kept.get(request.key)
        if kept is None:
            return False
        own, length = len(kept.sequence), len(request.prompt) + len(request.tokens)
        if length <= own or (length > 2 * own and not self._replays):
            return False
        return bool(np.array_equal(kept.sequence, np.concatenate([request.prompt, request.tokens])[:own]))

    def take(self, key: SampleKey) -> CachedTurn:
        """Gives out what is kept of a sample, which `fits`."""
        return self._kept.pop(key)

    def drop(self, key: SampleKey) -> None:
        """Forgets a sample."""
        self._kept.pop(key, None)

    def clear(self) -> None:
        """Forgets all: the weights change, or others want the device."""
        self._kept.clear()
