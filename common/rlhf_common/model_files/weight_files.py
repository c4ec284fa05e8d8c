"""The weight files of a model folder, and their headers. No torch is needed.

`model.safetensors.index.json` names the files if it exists; otherwise `model.safetensors` is the only one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlhf_common.json_document import parse_json

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
MAX_HEADER_BYTES: Final = 100 * 1024 * 1024
"""Maximum bytes of a header."""
MISSING: Final = "ModelMissing"
"""Failure reason for a folder that lacks a file."""
NAMED: Final = 3
"""Names that an error lists before it counts the rest."""
CONFIG_TYPES: Final[Mapping[str, str]] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Weight type in a header -> its name in config.json."""
_SHARD: Final = re.compile(r"model-\d+-of-\d+\.safetensors")
_PICKLED: Final = re.compile(r".*\.(bin|pt|pth)")
_LENGTH_BYTES: Final = 8
_TYPE_BITS: Final[Mapping[str, int]] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip
"""Bits per number, by its type in a header. The length of other types is not checked."""


class FolderError(Exception):
    """A model folder that cannot be used; `reason` is the failure's reason, and the message describes the problem."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class TensorEntry:
    """Location of one tensor."""

    file: Path
    dtype: str
    """Type by its safetensors name, such as BF16."""
    shape: tuple[int, ...]
    start: int
    """First byte of the tensor in the file."""
    end: int
    """Byte after its last one."""

    @property
    def count(self) -> int:
        """Number of values."""
        total = 1
        for extent in self.shape:
            total *= extent
        return total


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a folder, as their headers describe them."""

    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the weight files of a folder, sorted. Raises FolderError if files are missing, or readers could choose
    differently.
    """
    present = {file.name for file in folder.glob("*.safetensors")}
    if not (folder / INDEX).is_file():
        return (_single_file(folder, present),)
    named = sorted(set(weight_map(folder).values()))
    if missing := [name for name in named if name not in present]:
        raise FolderError(MISSING, f"it holds no {_some(missing)}, but {INDEX} names it: weights are missing")
    stale = sorted(name for name in present - set(named) if name == SINGLE or _SHARD.fullmatch(name))
    if stale:
        raise FolderError(
            "ModelCorrupt",
            f"it holds {_some(stale)} beside {INDEX}, which names other files: readers would take different weights; "
            f"remove {INDEX} and the files it names, or remove {_some(stale)}",
        )
    return tuple(folder / name for name in named)


def read_weight_files(folder: Path, *, whole: bool = True) -> WeightFiles:
    """Return the weight files of a folder with their headers. `whole`: whether the data must be present.

    Raises FolderError like `weight_files`, for damaged files, for a tensor in two files, and for one in the index
    alone.
    """
    files = weight_files(folder)
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in _header(file, whole).items():
            if name in tensors:
                raise FolderError("ModelCorrupt", f"{name} is in {tensors[name].file.name} and in {file.name}")
            tensors[name] = entry
    if (folder / INDEX).is_file():
        missing = sorted(set(weight_map(folder)) - set(tensors))
        if missing:
            raise FolderError("ModelCorrupt", f"{INDEX} promises {_some(missing)}, but no file has it")
    return WeightFiles(files, tensors)


def read_header(file: Path) -> Mapping[str, TensorEntry]:
    """Return the tensors of one safetensors file by name. Raises FolderError if it is damaged."""
    return _header(file, whole=True)


def weight_map(folder: Path) -> dict[str, str]:
    """Return tensor name -> file name from the index of a folder. Raises FolderError if it cannot be used."""
    names = _index(folder).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise FolderError("ModelCorrupt", f"{INDEX} has no weight_map that maps tensor names to file names")
    if outside := [name for name in names.values() if Path(name).name != name]:
        raise FolderError("ModelCorrupt", f"{INDEX} points outside the folder: {outside[0]!r}")
    return names


def check_index(folder: Path) -> None:
    """Raise FolderError for an index without the metadata that transformers requires."""
    if (folder / INDEX).is_file() and not isinstance(_index(folder).get("metadata"), dict):
        raise FolderError("ModelCorrupt", f'{INDEX} has no metadata, which transformers needs: add "metadata": {{}}')


def _index(folder: Path) -> dict[str, Any]:
    try:
        index = parse_json((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FolderError("ModelCorrupt", f"{INDEX} cannot be read: {error!r}") from error
    return index if isinstance(index, dict) else {}


def _single_file(folder: Path, present: set[str]) -> Path:
    """Return the only weight file of a folder without an index."""
    shards = sorted(name for name in present if _SHARD.fullmatch(name))
    if SINGLE not in present:
        why = f"it holds no {SINGLE}"
        if shards:
            why += f" and no {INDEX}, but {_some(shards)}: put the index beside them"
        elif pickled := sorted(item.name for item in folder.iterdir() if _PICKLED.fullmatch(item.name)):
            why += f"; {_some(pickled)} may run code and is never read: save the model as safetensors"
        raise FolderError(MISSING, why)
    if others := sorted(present - {SINGLE}):
        raise FolderError(
            "ModelCorrupt",
            f"it holds {_some(others)} beside {SINGLE}, and no {INDEX} says which of them are the model: readers would "
            f"take different weights; move {_some(others)} away",
        )
    return folder / SINGLE


def _header(file: Path, whole: bool) -> dict[str, TensorEntry]:
    """Return the tensors of a file, which has eight bytes of length, a JSON header, and the data."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise ValueError(f"its header would have {length} bytes")
            header = parse_json(stream.read(length))
        begin = _LENGTH_BYTES + length
        entries = {name: _entry(file, begin, entry) for name, entry in header.items() if name != "__metadata__"}
        end = max((entry.end for entry in entries.values()), default=begin)
        if whole and end != size:
            raise ValueError(f"it has {size} bytes, and its header describes {end}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise FolderError("ModelCorrupt", f"{file.name} is truncated or damaged: {error}") from error
    return entries


def _entry(file: Path, begin: int, described: Mapping[str, Any]) -> TensorEntry:
    first, last = (int(offset) for offset in described["data_offsets"])
    shape = tuple(int(extent) for extent in described["shape"])
    entry = TensorEntry(file, str(described["dtype"]), shape, begin + first, begin + last)
    bits = _TYPE_BITS.get(entry.dtype)
    if first < 0 or min((0, *shape)) < 0 or (bits is not None and (last - first) * 8 != entry.count * bits):
        raise ValueError(f"{entry.dtype} of shape {list(shape)} does not take bytes {first} to {last}")
    return entry


def _some(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
