"""What runs in each of vLLM's executor processes: mixed into its worker class, called by `collective_rpc`.

Rule: each capability is a module of its own, and a method here only hands it the worker's parts. Names of methods must
not be those of a worker of vLLM, which refuses to start then.
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
    """Methods of vLLM's worker, in which `self` is that worker."""

    model_runner: Any
    _rlhf_caches: HostCaches | None = None
    rlhf_update: LayerwiseUpdate

    def rlhf_bind_to_worker(self) -> None:
        """Let this process, one of several, end with the worker that it belongs to."""
        bind_to_worker()

    def rlhf_draw_by_key(self, parameters: SamplingParameters) -> None:
        """Let tokens be drawn by their sample's key from now on, and drafts be verified by what is drawn."""
        self.model_runner.sampler = KeyedSampler(self.model_runner, parameters)
        verify_drafts(self.model_runner, self.model_runner.sampler)

    def rlhf_begin_weights(self, draft: bool) -> None:
        """An update of all weights begins: of the policy, or of the draft model that vLLM drafts by."""
        self.rlhf_update = LayerwiseUpdate(self.model_runner, draft=draft)
        self.rlhf_update.begin()

    def rlhf_load_weights(self, named: Iterable[Named]) -> None:
        """Load weights of this very process."""
        self.rlhf_update.load(named)

    def rlhf_load_piece(self, piece: bytes) -> None:
        """Load weights that lie in memory of the worker's process."""
        self.rlhf_update.load(opened_piece(piece, HostSharing()).items())

    def rlhf_finish_weights(self) -> None:
        """All have come."""
        self.rlhf_update.finish()

    def rlhf_cache_bytes(self) -> int:
        """Return the bytes of this process's key-value caches."""
        return sum(storage.nbytes() for storage in storages_of(self.model_runner.kv_caches))

    def rlhf_free_caches(self) -> None:
        """Give the memory of the key-value caches back, on a CPU."""
        if self._rlhf_caches is None:
            self._rlhf_caches = HostCaches(storages_of(self.model_runner.kv_caches))
        self._rlhf_caches.free()

    def rlhf_take_caches(self) -> None:
        """Undo that, with zeros in them."""
        if self._rlhf_caches is not None:
            self._rlhf_caches.take()
