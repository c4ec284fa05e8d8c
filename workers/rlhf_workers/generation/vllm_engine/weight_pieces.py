"""Sends a version's weights from the worker to vLLM's executor processes, in chunks of mapped memory.

Rule: no tensor is pickled. A chunk is memory that the worker lends; its message has names, types, shapes and places of
the tensors.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import torch

from rlhf_common import control_pb2 as pb
from rlhf_workers.shared_memory.regions import MemorySharing, RegionRefusedError
from rlhf_workers.weights.manifest import ALIGNMENT, check, check_places, places, shaped
from rlhf_workers.weights.tensor_types import NAMES

PIECE_BYTES: Final = 1 << 28
"""Maximum bytes of a chunk, unless one tensor is larger; gaps for alignment are not counted."""

Named = tuple[str, torch.Tensor]


def pieces(tensors: Iterable[Named], sharing: MemorySharing, size: int = PIECE_BYTES) -> Iterator[bytes]:
    """Yield each chunk as a message for `opened_piece`; its memory is released when the next one is requested.

    Raises RegionRefusedError without memory for a chunk.
    """
    batch: list[Named] = []
    batch_bytes = 0
    for name, tensor in tensors:
        if batch and batch_bytes + tensor.nbytes > size:
            yield from _lent(batch, sharing)
            batch, batch_bytes = [], 0
        batch.append((name, tensor))
        batch_bytes += tensor.nbytes
    if batch:
        yield from _lent(batch, sharing)


def opened_piece(message: bytes, sharing: MemorySharing) -> dict[str, torch.Tensor]:
    """Return parameter name -> tensor in the chunk's memory, read-only and mapped while one of them is used.

    Raises RegionRefusedError or WeightManifestError for an unusable chunk.
    """
    loan = pb.WeightLoan.FromString(message)
    check(loan.manifest)
    check_places(loan.manifest, loan.memory.size)
    if not sharing.lends(loan.memory):
        raise RegionRefusedError("it is memory of a kind that is not used here")
    region = sharing.open(loan.memory)
    return shaped(loan.manifest, places(loan.manifest, region.memory))


def _lent(batch: list[Named], sharing: MemorySharing) -> Iterator[bytes]:
    manifest, end = pb.WeightManifest(), 0
    for name, tensor in batch:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        manifest.tensors.add(name=name, dtype=NAMES[tensor.dtype], shape=tensor.shape, offset=offset)
        end = offset + tensor.nbytes
    region = sharing.allocate(end)
    try:
        for part, (_, tensor) in zip(places(manifest, region.memory), batch, strict=True):
            if tensor.numel():
                part.view(tensor.dtype).copy_(tensor.detach().reshape(-1))
        yield pb.WeightLoan(manifest=manifest, memory=region.handle()).SerializeToString()
    finally:
        region.close()
