"""WeightSource service: streams the tensors of this worker's stages to peers, with a manifest of checksums.

Rule: serves exactly the version asked for or refuses with FAILED_PRECONDITION; bytes are raw little-endian tensor data.
Never changes a tensor; a peer that reads while a version changes is told by the checksum.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import torch

from rlhf_api import control_pb2 as pb
from rlhf_api.channels import CHUNK_BYTES
from rlhf_api.control_pb2_grpc import WeightSourceServicer
from rlhf_workers.failures import WorkError
from rlhf_workers.worker_role import WeightProvider

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors name -> torch dtype: what travels."""

Context = grpc.aio.ServicerContext[Any, Any]

NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory (no copy when it is contiguous) as bytes; shared, so do not keep it."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data.cast("B") if flat.numel() else memoryview(b"")


@dataclass(frozen=True)
class _Described:
    provider: WeightProvider
    manifest: pb.WeightManifest


class WeightSourceService(WeightSourceServicer):
    """Serves whatever the worker's training role provides, asked for anew at every call."""

    def __init__(self, provider: Callable[[], WeightProvider | None]) -> None:
        self._provider = provider
        self._described: dict[str, _Described] = {}  # model -> checksums of the version last asked for
        self._describing = asyncio.Lock()

    async def Describe(  # noqa: N802 (gRPC's name)
        self, request: pb.WeightRequest, context: Context
    ) -> pb.WeightManifest:
        """Names, types, shapes and checksums; computed once a version, however many peers ask."""
        provider = await self._find(request, context)
        async with self._describing:
            known = self._described.get(request.model)
            if known and known.provider is provider and known.manifest.version == request.version:
                return known.manifest
            try:
                manifest = await asyncio.to_thread(_describe, provider, request.model, request.version)
            except WorkError as error:
                await _refuse(context, error)
            self._described[request.model] = _Described(provider, manifest)
            return manifest

    async def Fetch(  # noqa: N802 (gRPC's name)
        self, request: pb.WeightRequest, context: Context
    ) -> AsyncIterator[pb.WeightChunk]:
        """Every tensor in the provider's order, cut into chunks."""
        provider = await self._find(request, context)
        try:
            tensors = provider.tensors(request.model, request.version)
            while (entry := await asyncio.to_thread(next, tensors, None)) is not None:
                name, tensor = entry
                data = raw_bytes(tensor)
                for offset in range(0, len(data), CHUNK_BYTES):
                    yield pb.WeightChunk(name=name, offset=offset, data=bytes(data[offset : offset + CHUNK_BYTES]))
        except WorkError as error:
            await _refuse(context, error)

    async def _find(self, request: pb.WeightRequest, context: Context) -> WeightProvider:
        provider = self._provider()
        if provider is None:
            message = f"this worker holds no weights to serve (asked for {request.model} version {request.version})"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        return provider


async def _refuse(context: Context, error: WorkError) -> NoReturn:
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    raise AssertionError("abort raises")


def _describe(provider: WeightProvider, model: str, version: int) -> pb.WeightManifest:
    manifest = pb.WeightManifest(version=version)
    for name, tensor in provider.tensors(model, version):
        if tensor.dtype not in NAMES:
            raise WorkError("WeightsInvalid", f"{model} parameter {name}: {tensor.dtype} does not travel")
        crc32 = zlib.crc32(raw_bytes(tensor))
        manifest.tensors.add(name=name, dtype=NAMES[tensor.dtype], shape=tensor.shape, crc32=crc32)
    return manifest
