"""Methods of vLLM's executor processes: mixed into vLLM's worker class, called by `collective_rpc`.

Rule: method names must not exist in vLLM's worker, which would refuse to start.
"""

from collections.abc import Iterable
from typing import Any

from rlhf_workers.generation.engine import SamplingParameters
from rlhf_workers.generation.vllm_engine.draft_verification import verify_drafts
from rlhf_workers.generation.vllm_engine.executor_processes import bind_to_worker
from rlhf_workers.generation.vllm_engine.host_caches import HostCaches, storages_of
from rlhf_workers.generation.vllm_engine.keyed_sampler import KeyedSampler
from rlhf_workers.generation.vllm_engine.kv_executor import KvExecutor
from rlhf_workers.generation.vllm_engine.weight_pieces import Named, opened_piece
from rlhf_workers.generation.vllm_engine.weight_transfer import LayerwiseUpdate
from rlhf_workers.shared_memory.host_regions import HostSharing


class WorkerExtension(KvExecutor):
    """Methods of vLLM's worker; `self` is that worker."""

    model_runner: Any
    _rlhf_caches: HostCaches | None = None
    rlhf_update: LayerwiseUpdate

    def rlhf_bind_to_worker(self) -> None:
        """Make this process, one of several, end with its worker."""
        bind_to_worker()

    def rlhf_draw_by_key(self, parameters: SamplingParameters) -> None:
        """Draw tokens by their sample's key from now on, and verify drafts against them."""
        self.model_runner.sampler = KeyedSampler(self.model_runner, parameters)
        verify_drafts(self.model_runner, self.model_runner.sampler)

    def rlhf_begin_weights(self, draft: bool) -> None:
        """Begin an update of all weights, of the policy or of vLLM's draft model."""
        self.rlhf_update = LayerwiseUpdate(self.model_runner, draft=draft)
        self.rlhf_update.begin()

    def rlhf_load_weights(self, named: Iterable[Named]) -> None:
        """Load weights that are in this process."""
        self.rlhf_update.load(named)

    def rlhf_load_piece(self, piece: bytes) -> None:
        """Load weights from memory of the worker's process."""
        self.rlhf_update.load(opened_piece(piece, HostSharing()).items())

    def rlhf_finish_weights(self) -> None:
        """Finish the update."""
        self.rlhf_update.finish()

    def rlhf_cache_bytes(self) -> int:
        """Return the bytes of this process's KV caches."""
        return sum(storage.nbytes() for storage in storages_of(self.model_runner.kv_caches))

    def rlhf_free_caches(self) -> None:
        """Free the memory of the KV caches, on a CPU."""
        if self._rlhf_caches is None:
            self._rlhf_caches = HostCaches(storages_of(self.model_runner.kv_caches))
        self._rlhf_caches.free()

    def rlhf_take_caches(self) -> None:
        """Allocate the caches again, zeroed."""
        if self._rlhf_caches is not None:
            self._rlhf_caches.take()
