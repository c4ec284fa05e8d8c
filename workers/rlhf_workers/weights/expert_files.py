"""Converts names and shapes of experts between weight files and transformers' parameters.

A folder stores every expert's matrices separately. A transformers model has two tensors per layer, `gate_up_proj`
[experts, 2 x inner, hidden] and `down_proj` [experts, hidden, inner].
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch

_PARAMETER: Final = re.compile(r"(model\.layers\.\d+\.)mlp\.(experts\.(?:gate_up_proj|down_proj)|gate\.weight)")


@dataclass(frozen=True)
class ExpertNames:
    """A family's names for the parts of an expert layer."""

    block: str
    gate: str
    up: str
    down: str


NAMES: Final[Mapping[str, ExpertNames]] = {
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
}
"""Names by `model_type`."""


class Tensors(Protocol):
    """Tensors by name, as in `tensor_file.TensorFolder`."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Return a tensor of this exact shape."""


class ExpertFolder:
    """Tensors of a folder under the names of transformers' parameters."""

    def __init__(self, tensors: Tensors, names: ExpertNames) -> None:
        self._tensors, self._names = tensors, names

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or _PARAMETER.fullmatch(name) is not None

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        """See TensorFolder; errors use the folder's names."""
        found = _PARAMETER.fullmatch(name)
        if found is None or name in self._tensors:
            return self._tensors.read(name, shape)
        block, part = f"{found[1]}{self._names.block}.", found[2]
        if part == "gate.weight":
            return self._tensors.read(block + part, shape)
        maps = _maps(part, self._names)
        each = torch.Size((shape[1] // len(maps), shape[2]))
        return torch.stack(
            [
                torch.cat(
                    [self._tensors.read(f"{block}experts.{expert}.{projection}.weight", each) for projection in maps]
                )
                for expert in range(shape[0])
            ]
        )


def as_parameters(tensors: Tensors, family: str) -> Tensors:
    """Return a folder's tensors with transformers' names and shapes; unchanged if `family` is not in NAMES."""
    return ExpertFolder(tensors, NAMES[family]) if family in NAMES else tensors


def as_in_files(name: str, value: torch.Tensor, family: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, view) of a parameter as the files of a folder store it."""
    found = _PARAMETER.fullmatch(name) if family in NAMES else None
    if found is None:
        yield name, value
        return
    names, part = NAMES[family], found[2]
    block = f"{found[1]}{names.block}."
    if part == "gate.weight":
        yield block + part, value
        return
    maps = _maps(part, names)
    for expert, matrices in enumerate(value.unbind()):
        for projection, matrix in zip(maps, matrices.chunk(len(maps)), strict=True):
            yield f"{block}experts.{expert}.{projection}.weight", matrix


def _maps(part: str, names: ExpertNames) -> tuple[str, ...]:
    return (names.down,) if part.endswith("down_proj") else (names.gate, names.up)
