"""Client of one peer's WeightSource: reads the manifest, then chunks, and checks each tensor's checksum.

Rule: `read` returns everything in the manifest, or raises WorkError with the peer's name.
"""

import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import torch

from rlhf_common import control_pb2 as pb
from rlhf_common.channels import channel
from rlhf_common.control_pb2_grpc import WeightSourceStub
from rlhf_workers.failures import WorkError
from rlhf_workers.weights.chunks import FETCH, ReceivedChunk, decode
from rlhf_workers.weights.manifest import WeightManifestError, check, tensor_bytes
from rlhf_workers.weights.source import raw_bytes
from rlhf_workers.weights.tensor_types import DTYPES

MOST_WAITING: Final = 4
"""Maximum chunks that wait to be copied while the next one is received: 16 MiB."""


class WeightsRefusedError(WorkError):
    """The peer refused the requested weights; this fetch does not ask it again."""


class WeightStream:
    """Reader of one source; other threads may call `close` and `cut_off_if_idle`."""

    def __init__(self, model: str, version: int, address: str, certificates: Path | None) -> None:
        self.model, self.version, self.address, self.certificates = model, version, address, certificates
        self.closed = False
        self.received, self.size = 0, 0
        """Bytes received in the current attempt, and bytes of the tensors; 0 while unknown."""
        self._request = pb.WeightRequest(model=model, version=version)
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        self._heard = 0.0
        self._idle = 0.0

    def read(self, describe_seconds: float) -> dict[str, torch.Tensor]:
        """Read all tensors of this source in one attempt; WorkError if that fails."""
        self._idle, self.received = 0.0, 0
        with channel(self.address, self.certificates) as peer:
            stub = WeightSourceStub(peer)
            try:
                manifest = stub.Describe(self._request, timeout=describe_seconds)
                tensors = self._allocate(manifest)
                fetch = peer.unary_stream(FETCH, pb.WeightRequest.SerializeToString, decode)
                self._begin(fetch(self._request))
                self._receive(manifest, tensors)
            except grpc.RpcError as error:
                raise self._failure(error, describe_seconds) from error
            finally:
                self._begin(None)
        return tensors

    def close(self) -> None:
        """End the reading for good."""
        with self._lock:
            self.closed = True
            if self._call is not None:
                self._call.cancel()

    def cut_off_if_idle(self, seconds: float) -> None:
        """Cancel a Fetch that brought nothing for more than `seconds` seconds."""
        with self._lock:
            silence = time.monotonic() - self._heard
            if self._call is not None and silence > seconds:
                self._idle = silence
                self._call.cancel()

    # ------------------------------------------------------------ parts of read

    def _begin(self, call: grpc.Call | None) -> None:
        with self._lock:
            self._call, self._heard = call, time.monotonic()
            if self.closed and call is not None:
                call.cancel()

    def _allocate(self, manifest: pb.WeightManifest) -> dict[str, torch.Tensor]:
        if manifest.version != self._request.version:
            raise self._error("WeightsUnavailable", f"it describes version {manifest.version}")
        try:
            check(manifest)
        except WeightManifestError as error:
            raise self._error("WeightsCorrupt", str(error), retryable=False) from error
        return {entry.name: torch.empty(tuple(entry.shape), dtype=DTYPES[entry.dtype]) for entry in manifest.tensors}

    def _receive(self, manifest: pb.WeightManifest, tensors: dict[str, torch.Tensor]) -> None:
        """Receive every tensor; a chunk's bytes are copied and summed while the next ones arrive."""
        memory = {name: np.asarray(raw_bytes(tensor), np.uint8) for name, tensor in tensors.items()}
        filled = dict.fromkeys(tensors, 0)
        checksums = dict.fromkeys(tensors, 0)
        self.size = sum(map(len, memory.values()))

        def store(chunk: ReceivedChunk, end: int) -> None:
            np.copyto(memory[chunk.name][chunk.offset : end], np.asarray(chunk.data, np.uint8))
            checksums[chunk.name] = zlib.crc32(chunk.data, checksums[chunk.name])

        with ThreadPoolExecutor(1, "weights") as copier:  # one thread: a checksum continues from chunk to chunk
            waiting: deque[Future[None]] = deque()
            for chunk in self._chunks():
                self.received += len(chunk.data)
                end = chunk.offset + len(chunk.data)
                if chunk.name not in memory or chunk.offset != filled[chunk.name] or end > len(memory[chunk.name]):
                    raise self._error("WeightsCorrupt", f"unexpected bytes {chunk.offset} to {end} of {chunk.name!r}")
                filled[chunk.name] = end
                waiting.append(copier.submit(store, chunk, end))
                if len(waiting) > MOST_WAITING:
                    waiting.popleft().result()
            for stored in waiting:
                stored.result()
        self._check(manifest, filled, checksums)

    def _check(self, manifest: pb.WeightManifest, filled: Mapping[str, int], checksums: Mapping[str, int]) -> None:
        """Raise WorkError when a tensor is incomplete or differs from the manifest."""
        for entry in manifest.tensors:
            size = tensor_bytes(entry)
            if filled[entry.name] != size:
                problem = f"the stream ended after {filled[entry.name]} of {size} bytes of {entry.name}"
                raise self._error("WeightsCorrupt", problem)
            if checksums[entry.name] != entry.crc32:
                problem = f"checksum of {entry.name} is {checksums[entry.name]:08x}, announced {entry.crc32:08x}"
                raise self._error("WeightsCorrupt", problem)

    def _chunks(self) -> Iterator[ReceivedChunk]:
        call = self._call
        assert call is not None
        for chunk in call:  # type: ignore[attr-defined]  # a stream of chunks
            self._heard = time.monotonic()
            yield chunk

    # ------------------------------------------------------------ failures

    def _failure(self, error: grpc.RpcError, describe_seconds: float) -> WorkError:
        code, details = error.code(), error.details()
        if code == grpc.StatusCode.FAILED_PRECONDITION:
            return WeightsRefusedError("WeightsUnavailable", self._message(details or ""), retryable=True)
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return self._error("WeightsUnavailable", f"no manifest within {describe_seconds:g} s")
        if self._idle:
            return self._error("WeightsUnavailable", f"no chunk for {self._idle:.1f} s")
        return self._error("WeightsUnavailable", f"{code.name.lower().replace('_', ' ')}: {details}")

    def _error(self, reason: str, problem: str, *, retryable: bool = True) -> WorkError:
        return WorkError(reason, self._message(problem), retryable=retryable)

    def _message(self, problem: str) -> str:
        return f"weights of {self._request.model} version {self._request.version} from {self.address}: {problem}"
