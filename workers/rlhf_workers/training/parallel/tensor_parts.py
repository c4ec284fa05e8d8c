"""Which part of a folder's tensor a rank of a tensor group holds: whole rows or whole columns of it, or all of it.

Also owns what such a part of a moment is called in a checkpoint, `<name>.<moment>.rows-<first>-<after the last>` or
`.columns-`, and who keeps which tensor whole for those who ask. Pure but for tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from rlhf_workers.weights.tensor_file import TensorFolder

ENDINGS: Final = (".rows-", ".columns-")
"""Between a tensor's name and `<first>-<after the last>`, by the dimension that is split."""


@dataclass(frozen=True)
class TensorPart:
    """Rows (dimension 0) or columns (1) `first` to `after` - 1."""

    dimension: int
    first: int
    after: int

    @property
    def length(self) -> int:
        """How many there are; none of a rank behind the last row."""
        return self.after - self.first

    @property
    def ending(self) -> str:
        """What follows the name of a tensor of which this is all that a file has."""
        return f"{ENDINGS[self.dimension]}{self.first}-{self.after}"

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part: a view."""
        return whole.narrow(self.dimension, self.first, self.length)


def equal_part(shape: torch.Size, dimension: int, rank: int, count: int) -> TensorPart:
    """Return a rank's part where all have one length, but for the last ones where it does not divide."""
    length = shape[dimension]
    size = -(-length // count)
    return TensorPart(dimension, min(length, rank * size), min(length, (rank + 1) * size))


def near_equal_keepers(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return name -> rank: each to the one that keeps least so far."""
    kept = [0] * ranks
    result = {}
    for name, size in sizes.items():
        result[name] = kept.index(min(kept))
        kept[result[name]] += size
    return result


def read_parts(tensors: TensorFolder, name: str, shape: torch.Size) -> torch.Tensor:
    """Return a tensor, put together where ranks wrote parts of it; an error names the first part that is missing."""
    if name in tensors:
        return tensors.read(name, shape)
    for dimension, ending in enumerate(ENDINGS):
        parts = sorted(_parts(tensors, name, dimension), key=lambda part: part.first)
        if not parts:
            continue
        value, filled = torch.empty(shape), 0
        for part in parts:
            if part.first != filled:
                break
            of_file = torch.Size(part.length if place == dimension else size for place, size in enumerate(shape))
            part.cut(value).copy_(tensors.read(f"{name}{part.ending}", of_file))
            filled = part.after
        return value if filled == shape[dimension] else tensors.read(f"{name}{ending}{filled}-", shape)
    return tensors.read(name, shape)  # says that it is missing


def _parts(tensors: TensorFolder, name: str, dimension: int) -> list[TensorPart]:
    found = []
    for written in tensors.names(f"{name}{ENDINGS[dimension]}"):
        first, _, after = written.removeprefix(f"{name}{ENDINGS[dimension]}").partition("-")
        found.append(TensorPart(dimension, int(first), int(after)))
    return found
