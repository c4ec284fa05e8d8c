"""Reads and writes named tensors in safetensors files; an incomplete file never gets its final name.

A write streams to `<name>.tmp`, hashes, syncs, and renames.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from rlhf_common import control_pb2 as pb
from rlhf_common.model_files.weight_files import FolderError, read_weight_files
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError

_DTYPES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
CHECKPOINT_FIELD: Final = "spec.checkpoints.path"
TYPE_FIELD: Final = "spec.checkpoints.dtype"
MASTERS: Final = "masters"
"""Folder of a checkpoint with float32 weights of models whose own folder has another type."""
CHUNK_BYTES: Final = 16 * 1024 * 1024
"""Maximum bytes of a tensor that are converted and copied to the host at once."""


class TensorFolder:
    """Tensors by name over one or more safetensors files.

    Each file is opened once; tensors are read on request.
    """

    def __init__(self, files: Sequence[Path], field: str) -> None:
        """Raises WorkError ModelCorrupt with `field` and the file when a file is missing or damaged."""
        self.field = field
        self._files: dict[str, Path] = {}
        self._opened: dict[Path, Any] = {}
        for file in files:
            try:
                self._opened[file] = safe_open(file, framework="pt")
                self._files.update(dict.fromkeys(self._opened[file].keys(), file))
            except (SafetensorError, OSError) as error:
                raise self._corrupt(file, f"is missing, truncated or damaged: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self, prefix: str) -> list[str]:
        """Return the names with this prefix."""
        return [name for name in self._files if name.startswith(prefix)]

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Return a CPU tensor of this shape; WorkError ModelCorrupt if it is missing, damaged or of another shape."""
        if name not in self._files:
            where = ", ".join(sorted({file.name for file in self._files.values()})) or "no file"
            raise self._corrupt(None, f"{name} is missing from {where}")
        try:
            tensor: torch.Tensor = self._opened[self._files[name]].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise self._corrupt(self._files[name], f"{name} cannot be read: {error}") from error
        if tensor.shape != shape:
            raise self._corrupt(self._files[name], f"{name} has shape {list(tensor.shape)}, needs {list(shape)}")
        return tensor

    def _corrupt(self, file: Path | None, why: str) -> WorkError:
        message = f"{self.field}: {file or ''} {why}".replace("  ", " ")
        return WorkError("ModelCorrupt", message, field=self.field, exit_code=ExitCode.BAD_MODEL)


def model_tensors(folder: Path, field: str) -> TensorFolder:
    """Return the tensors of a Hugging Face folder; WorkError if its weight files are missing or damaged."""
    try:
        files = read_weight_files(folder).files
    except FolderError as error:
        message = f"{field}: {folder}: {error}"
        raise WorkError(error.reason, message, field=field, exit_code=ExitCode.BAD_MODEL) from error
    return TensorFolder(files, field)


def checkpoint_tensors(checkpoint: Path, model: str, field: str) -> TensorFolder:
    """Return the float32 weights of a model in a checkpoint: its masters, if the folder has another type."""
    masters = sorted((checkpoint / MASTERS).glob(f"{model}-stage-*.safetensors"))
    return TensorFolder(masters, CHECKPOINT_FIELD) if masters else model_tensors(checkpoint / model, field)


def write_weights(
    folder: Path, model: str, part: str, weights: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> list[pb.CheckpointFile]:
    """Write the weights of a stage in `dtype`, and also in their own type if `dtype` is not float32.

    `part` names the stage and its share. Raises WorkError as `write_tensors`.
    """
    files = [write_tensors(folder, f"{model}/model-stage-{part}.safetensors", weights, model, dtype)]
    if dtype != torch.float32:
        files.append(write_tensors(folder, f"{MASTERS}/{model}-stage-{part}.safetensors", weights, ""))
    return files


def write_tensors(
    folder: Path, name: str, tensors: Mapping[str, torch.Tensor], model: str, dtype: torch.dtype | None = None
) -> pb.CheckpointFile:
    """Write `folder/name` completely or not at all, in `dtype` or in the tensors' own types.

    Raises WorkError StorageFull, StorageDenied, or StorageFailed for a value beyond float16.
    """
    header, offset = {}, 0
    for key, tensor in tensors.items():
        written = dtype or tensor.dtype
        size = tensor.numel() * written.itemsize
        header[key] = {
            "dtype": _DTYPES[written], "shape": list(tensor.shape), "data_offsets": [offset, offset + size],
        }  # fmt: skip
        offset += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned, as the format requires

    def parts() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for tensor in tensors.values():
            yield from _bytes_of(tensor, dtype or tensor.dtype)

    parameters = list(tensors) if model else []
    return write_file(folder, name, parts(), model, parameters)


def write_file(
    folder: Path, name: str, parts: Iterator[bytes | memoryview], model: str = "", parameters: Sequence[str] = ()
) -> pb.CheckpointFile:
    """Write `folder/name` from parts: temporary name, fsync, rename, fsync of the folder.

    Raises WorkError StorageFull or StorageDenied, and the errors of `parts`.
    """
    path = folder / name
    temporary = path.with_name(path.name + ".tmp")
    digest, size = hashlib.sha256(), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            for part in parts:
                digest.update(part)
                size += len(part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException as error:
        _discard(temporary)
        if isinstance(error, OSError):
            raise storage_error(path, error) from error
        raise
    return pb.CheckpointFile(path=name, bytes=size, sha256=digest.hexdigest(), model=model, parameters=parameters)


def storage_error(path: Path, error: OSError) -> WorkError:
    """Return the failure of a write: what was written where, and what the user can change."""
    full = error.errno in _FULL
    advice = "free space there, or point the field at a larger volume" if full else "make it writable for the workers"
    return WorkError(
        "StorageFull" if full else "StorageDenied",
        f"{CHECKPOINT_FIELD}: writing {path} failed: {error.strerror or error}; {advice}",
        field=CHECKPOINT_FIELD,
        exit_code=ExitCode.STORAGE,
    )


def _bytes_of(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield the raw little-endian bytes of a tensor in `dtype`, in chunks; WorkError for a value beyond float16."""
    flat = tensor.detach().reshape(-1)
    step = max(1, CHUNK_BYTES // tensor.element_size())
    for start in range(0, flat.numel(), step):
        chunk = flat[start : start + step]
        if dtype == torch.float16 and chunk.dtype != dtype and float(chunk.abs().max()) > torch.finfo(dtype).max:
            message = f"{TYPE_FIELD}: a weight is {float(chunk.abs().max()):g}, beyond float16: use Float32"
            raise WorkError("StorageFailed", message, field=TYPE_FIELD, exit_code=ExitCode.STORAGE)
        part: npt.NDArray[np.uint8] = chunk.to(dtype).cpu().contiguous().view(torch.uint8).numpy()
        yield part.data


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(temporary: Path) -> None:
    try:
        temporary.unlink(missing_ok=True)
    except OSError:
        return  # the first error is reported; the temporary folder is pruned later
