"""KV caches of an engine on a CPU, freed while it sleeps and allocated again when it wakes.

vLLM's own sleep does nothing on a CPU.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch


class HostCaches:
    """Cache memory of one model runner; allocated at first."""

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._storages = storages
        self._sizes: list[int] = []
        """Bytes of each storage while they are freed."""

    def free(self) -> int:
        """Free the memory; return its bytes, 0 if it was free already."""
        if self._sizes:
            return 0
        self._sizes = [storage.nbytes() for storage in self._storages]
        for storage in self._storages:
            storage.resize_(0)
        return sum(self._sizes)

    def take(self) -> int:
        """Allocate the memory again, zeroed; return its bytes, 0 if it was not free."""
        if not self._sizes:
            return 0
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
        taken, self._sizes = sum(self._sizes), []
        return taken


def storages_of(caches: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Return the storages of all layers' caches, each once, as layers may share them."""
    found: dict[int, torch.UntypedStorage] = {}
    for cache in caches:
        for tensor in cache if isinstance(cache, list | tuple) else (cache,):
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, storage)
    return list(found.values())
