"""Checks a peer's weight manifest before memory is allocated or mapped for it.

Rule: a valid manifest names a tensor once, with a type that can be transferred. In a loan a tensor lies within the lent
memory, after the previous one.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch

from rlhf_common import control_pb2 as pb
from rlhf_workers.weights.tensor_types import DTYPES

ALIGNMENT: Final = 256
"""Alignment of tensors in lent memory, in bytes: whole cache lines of a CPU."""


class WeightManifestError(Exception):
    """An invalid manifest; the message says why."""


def tensor_bytes(entry: pb.WeightTensor) -> int:
    """Return the bytes of a tensor whose type and shape were checked."""
    return math.prod(entry.shape) * DTYPES[entry.dtype].itemsize


def check(manifest: pb.WeightManifest) -> None:
    """Raise WeightManifestError for a duplicate name or an invalid type or shape."""
    names: set[str] = set()
    for entry in manifest.tensors:
        if entry.name in names:
            raise WeightManifestError(f"its manifest names {entry.name} twice")
        names.add(entry.name)
        if entry.dtype not in DTYPES or any(side < 0 for side in entry.shape):
            raise WeightManifestError(f"{entry.name} is {entry.dtype} {list(entry.shape)}, which does not travel")


def check_places(manifest: pb.WeightManifest, size: int) -> None:
    """Raise WeightManifestError unless each tensor of a checked manifest is aligned, begins after the previous one, and
    ends within `size` bytes.
    """
    end = 0
    for entry in manifest.tensors:
        if entry.offset % ALIGNMENT or entry.offset < end:
            raise WeightManifestError(
                f"{entry.name} begins at byte {entry.offset}, within or before the tensor before it"
            )
        end = entry.offset + tensor_bytes(entry)
        if end > size:
            raise WeightManifestError(f"{entry.name} ends at byte {end} of {size} that are lent")


def places(manifest: pb.WeightManifest, memory: torch.Tensor) -> list[torch.Tensor]:
    """Return the bytes of every tensor of a valid manifest with places: uint8 [bytes] views of `memory`."""
    return [memory[entry.offset : entry.offset + tensor_bytes(entry)] for entry in manifest.tensors]


def shaped(manifest: pb.WeightManifest, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return parameter name -> tensor over its bytes."""
    return {
        entry.name: part.view(DTYPES[entry.dtype]).view(tuple(entry.shape))
        for entry, part in zip(manifest.tensors, parts, strict=True)
    }
