"""The part of a folder's tensor on a rank of a tensor group: rows or columns of it, or all of it.

Also owns the name of such a part of a moment in a checkpoint, `<name>.<moment>.rows-<first>-<after the last>` or
`.columns-`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from rlhf_workers.weights.tensor_file import TensorFolder

ENDINGS: Final = (".rows-", ".columns-")
"""Text between a tensor's name and `<first>-<after the last>`, by the split dimension."""


@dataclass(frozen=True)
class TensorPart:
    """Rows (dimension 0) or columns (1) `first` to `after` - 1."""

    dimension: int
    first: int
    after: int

    @property
    def length(self) -> int:
        """Number of rows or columns; 0 on a rank after the last one."""
        return self.after - self.first

    @property
    def ending(self) -> str:
        """Suffix of a tensor's name in a file that has only this part."""
        return f"{ENDINGS[self.dimension]}{self.first}-{self.after}"

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part, as a view."""
        return whole.narrow(self.dimension, self.first, self.length)


def equal_part(shape: torch.Size, dimension: int, rank: int, count: int) -> TensorPart:
    """Return a rank's part; all have the same length, except the last ones if it does not divide."""
    length = shape[dimension]
    size = -(-length // count)
    return TensorPart(dimension, min(length, rank * size), min(length, (rank + 1) * size))


def near_equal_keepers(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return name -> rank: each goes to the rank with the least so far."""
    loads = [0] * ranks
    result = {}
    for name, size in sizes.items():
        result[name] = loads.index(min(loads))
        loads[result[name]] += size
    return result


def read_parts(tensors: TensorFolder, name: str, shape: torch.Size) -> torch.Tensor:
    """Return a tensor, assembled if ranks wrote parts of it; an error names the first missing part."""
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
    return tensors.read(name, shape)  # raises for the missing tensor


def _parts(tensors: TensorFolder, name: str, dimension: int) -> list[TensorPart]:
    found = []
    for written in tensors.names(f"{name}{ENDINGS[dimension]}"):
        first, _, after = written.removeprefix(f"{name}{ENDINGS[dimension]}").partition("-")
        found.append(TensorPart(dimension, int(first), int(after)))
    return found
