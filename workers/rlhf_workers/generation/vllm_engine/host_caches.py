"""The key-value caches of an engine on a CPU, given back while it sleeps and taken again when it wakes.

vLLM's own sleep does nothing on a CPU. Its weights are in host memory anyway, which is where a sleeping engine keeps
them; caches are memory that others can use. Rule: the tensors stay the same objects, only what is behind them goes and
comes, zeroed; so nothing that looks at them has to be told. Runs in each executor process, between steps.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch


class HostCaches:
    """The memory of the caches of one model runner; there at first."""

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._storages = storages
        self._sizes: list[int] = []
        """Bytes of each while they are given back."""

    def free(self) -> int:
        """Give the memory back; return its bytes, 0 where that was done before."""
        if self._sizes:
            return 0
        self._sizes = [storage.nbytes() for storage in self._storages]
        for storage in self._storages:
            storage.resize_(0)
        return sum(self._sizes)

    def take(self) -> int:
        """Take memory again, zeroed; return its bytes, 0 where nothing was given back."""
        if not self._sizes:
            return 0
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
        taken, self._sizes = sum(self._sizes), []
        return taken


def storages_of(caches: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Return the memory behind the caches of all layers, each once: layers may share it."""
    found: dict[int, torch.UntypedStorage] = {}
    for cache in caches:
        for tensor in cache if isinstance(cache, list | tuple) else (cache,):
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, storage)
    return list(found.values())
