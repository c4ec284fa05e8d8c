"""Joins several safetensors files into one.

Rule: bytes of tensors are copied unchanged; only the header is new.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rlhf_common.json_document import parse_json

_LENGTH_BYTES: Final = 8
"""Bytes of the length field before the header."""
_ALIGNMENT: Final = 8
"""Multiple of bytes to which a header is padded."""
_MAX_HEADER: Final = 100 * 1024 * 1024
"""Largest header in bytes."""


def join(parts: Sequence[Path], target: Path) -> None:
    """Write all tensors of `parts` into `target`, in their order.

    Raises OSError, and ValueError, for example when two parts have the same tensor.
    """
    merged: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, starts = 0, []
    for part in parts:
        header, start = _header(part)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if name in merged:
                raise ValueError(f"{name} is in {part.name} and in a file before it")
            merged[name] = entry | {"data_offsets": [offset + end for offset in entry["data_offsets"]]}
        end += part.stat().st_size - start
        starts.append(start)
    text = json.dumps(merged, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with target.open("wb") as out:
        out.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for part, start in zip(parts, starts, strict=True):
            with part.open("rb") as stream:
                stream.seek(start)
                shutil.copyfileobj(stream, out)


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header, and the offset of the tensors' data."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER:
            raise ValueError(f"{file}: header of {length} bytes")
        header: dict[str, Any] = parse_json(stream.read(length))
    return header, _LENGTH_BYTES + length
