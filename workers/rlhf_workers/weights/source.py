"""WeightSource service: lends or streams the tensors of this worker's stages to peers, with checksums.

Rule: serves the requested version, or refuses it with FAILED_PRECONDITION. A loan lasts from its message to the end of
the call.
"""

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import torch

from rlhf_common import control_pb2 as pb
from rlhf_common.channels import CHUNK_BYTES
from rlhf_workers.failures import WorkError
from rlhf_workers.shared_memory.host_regions import host_place
from rlhf_workers.shared_memory.regions import RegionRefusedError
from rlhf_workers.weights.chunks import encode
from rlhf_workers.weights.copies import WeightCopies, WeightCopy
from rlhf_workers.weights.tensor_types import NAMES
from rlhf_workers.worker_role import WeightProvider

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

REQUEST_SECONDS: Final = 30.0
"""Seconds until a reader that opened a call must send its request."""


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor: its own memory if it is contiguous, else a copy."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data.cast("B") if flat.numel() else memoryview(b"")


@dataclass(frozen=True)
class _Described:
    provider: WeightProvider
    manifest: pb.WeightManifest


class WeightSourceService:
    """Methods of the WeightSource service; `Fetch` yields messages as encoded bytes.

    Every call asks for the worker's current weight provider.
    """

    def __init__(self, provider: Callable[[], WeightProvider | None], copies: WeightCopies | None = None) -> None:
        """`copies` are the copies to lend; None lends nothing."""
        self._provider = provider
        self._copies = copies
        self._described: dict[str, _Described] = {}  # model -> checksums of the version last requested
        self._describing = asyncio.Lock()

    async def Describe(  # noqa: N802 (gRPC's name)
        self, request: pb.WeightRequest, context: Context
    ) -> pb.WeightManifest:
        """Return names, types, shapes and checksums; the last requested version of a model is cached."""
        provider = await self._find(request, context)
        async with self._describing:
            described = self._described.get(request.model)
            if described and described.provider is provider and described.manifest.version == request.version:
                return described.manifest
            try:
                manifest = await asyncio.to_thread(self._describe, provider, request)
            except WorkError as error:
                await _refuse(context, error)
            self._described[request.model] = _Described(provider, manifest)
            return manifest

    async def Fetch(  # noqa: N802 (gRPC's name)
        self, request: pb.WeightRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Yield every tensor in the provider's order, cut into chunks, each an encoded message."""
        provider = await self._find(request, context)
        host_memory = self._in_host_memory(provider, request)
        try:
            tensors = await asyncio.to_thread(host_memory.__enter__)
        except WorkError as error:
            await _refuse(context, error)
        try:
            while (entry := await asyncio.to_thread(next, tensors, None)) is not None:
                name, tensor = entry
                data = raw_bytes(tensor)
                for offset in range(0, len(data), CHUNK_BYTES):
                    yield encode(name, offset, data[offset : offset + CHUNK_BYTES])
        except WorkError as error:
            await _refuse(context, error)
        finally:
            host_memory.__exit__(None, None, None)

    async def Lend(  # noqa: N802 (gRPC's name)
        self, request_iterator: AsyncIterator[pb.WeightLoanRequest], context: Context
    ) -> AsyncIterator[pb.WeightLoan]:
        """Lend weights until the reader confirms its read, or the call ends otherwise."""
        requests = aiter(request_iterator)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                request = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call does not name the weights to lend")
        provider = await self._find(request.weights, context)
        copies = self._copies
        if copies is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker lends no memory")
        taking = asyncio.create_task(asyncio.to_thread(copies.take, provider, request.weights, request.reader))
        try:
            copy = await asyncio.shield(taking)
        except RegionRefusedError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except WorkError as error:
            await _refuse(context, error)
        except asyncio.CancelledError:
            taking.add_done_callback(lambda taken: _unread(copies, taken))
            raise
        read = False
        try:
            yield copy.message()
            last = await anext(requests, None)
            read = last is not None and last.read
        finally:
            copies.give_back(copy, read=read)

    @contextmanager
    def _in_host_memory(
        self, provider: WeightProvider, request: pb.WeightRequest
    ) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Yield the tensors in host memory; readers of a version share one copy of a device's tensors if possible."""
        tensors = provider.tensors(request.model, request.version)
        first = next(tensors, None)
        if first is None or first[1].device.type == "cpu":
            yield provider.tensors(request.model, request.version)
            return
        copy = None
        try:
            if self._copies is not None:
                copy = self._copies.take(provider, request, pb.MemoryPlace(host=host_place()))
        except RegionRefusedError as error:
            log.warning("weights of %s are brought to the host for every reader anew: %s", request.model, error)
        if self._copies is None or copy is None:
            yield ((name, tensor.cpu()) for name, tensor in provider.tensors(request.model, request.version))
            return
        try:
            yield copy.tensors()
        finally:
            self._copies.give_back(copy, read=True)

    def _describe(self, provider: WeightProvider, request: pb.WeightRequest) -> pb.WeightManifest:
        manifest = pb.WeightManifest(version=request.version)
        for name, tensor in provider.tensors(request.model, request.version):
            if tensor.dtype not in NAMES:
                raise WorkError("WeightsInvalid", f"{request.model} parameter {name}: {tensor.dtype} does not travel")
            manifest.tensors.add(name=name, dtype=NAMES[tensor.dtype], shape=tensor.shape)
        with self._in_host_memory(provider, request) as tensors:
            for entry, (_, tensor) in zip(manifest.tensors, tensors, strict=True):
                entry.crc32 = zlib.crc32(raw_bytes(tensor))
        return manifest

    async def _find(self, request: pb.WeightRequest, context: Context) -> WeightProvider:
        provider = self._provider()
        if provider is None:
            message = f"this worker holds no weights to serve (asked for {request.model} version {request.version})"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        return provider


def _unread(copies: WeightCopies, taken: "asyncio.Task[WeightCopy]") -> None:
    """End the loan of a reader that left before it got the loan."""
    if not taken.cancelled() and taken.exception() is None:
        copies.give_back(taken.result(), read=True)


async def _refuse(context: Context, error: WorkError) -> NoReturn:
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    raise AssertionError("abort raises")
