"""Checkpoint folders: written completely or not at all, discovered, pruned. Ranks write the large files.

`<path>/iteration-000010/` contains version 10, the result of 10 iterations. It is written as `.tmp-iteration-000010`,
compared with the sizes and SHA-256 sums of the ranks, made durable, and renamed. Discovery skips a damaged folder.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlhf_common import control_pb2 as pb
from rlhf_common.json_document import parse_json
from rlhf_common.model_files.companion_files import companion_files
from rlhf_common.model_files.weight_files import FolderError
from rlhf_common.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ExitCode
from rlhf_coordinator.failures import JobError, storage_error
from rlhf_coordinator.model_folders import local_folder
from rlhf_coordinator.storage import adapter_file
from rlhf_coordinator.storage.journal import sync_folder, write_atomically

FIELD: Final = "spec.checkpoints.path"
_NAME: Final = re.compile(r"iteration-(\d{6,})")
BEST_FILE: Final = "best.json"
"""File beside the checkpoints that names the checkpoint of the best evaluation."""
_FACTS: Final = "checkpoint.json"
_HASH_THREADS: Final = 4
"""Threads for hashing."""
_HASH_BLOCK: Final = 1 << 22
"""Bytes to read at once."""


class SourceFolder(NamedTuple):
    """A folder from which a model of the job starts."""

    path: str
    field: str
    """Its manifest path, for errors."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint under its final name."""

    version: int
    folder: Path

    @property
    def facts(self) -> dict[str, Any]:
        """The content of `checkpoint.json`. Raises OSError and ValueError."""
        content: dict[str, Any] = parse_json((self.folder / _FACTS).read_bytes())
        return content

    @property
    def made_ns(self) -> int:
        """Time of its `checkpoint.json`, in nanoseconds since the Unix epoch; 0 if the file cannot be read."""
        try:
            return (self.folder / _FACTS).stat().st_mtime_ns
        except OSError:
            return 0


def folder_of(path: Path, version: int) -> Path:
    """Return the final folder of a version."""
    return path / f"iteration-{version:06d}"


def prepare(path: Path, version: int) -> Path:
    """Return an empty temporary folder for a version. Raises OSError."""
    temporary = path / f".tmp-iteration-{version:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def discard(temporary: Path) -> None:
    """Remove a temporary folder with its content; ignore errors."""
    shutil.rmtree(temporary, ignore_errors=True)


def finish(
    temporary: Path,
    path: Path,
    version: int,
    results: Iterable[pb.CheckpointResult],
    sources: Mapping[str, SourceFolder],
    facts: Mapping[str, Any],
) -> Checkpoint:
    """Complete, check and publish a folder that the ranks have written, and return it.

    `sources`: model role, or DRAFT_MODEL -> its initial folder. Raises JobError when a file differs from its rank's
    report, adapters cannot be joined, or a source folder here is unusable; OSError when a write fails.
    """
    files = [file for result in results for file in result.files]
    sums = {file.path: (file.bytes, file.sha256) for file in files}
    problem = _mismatch(temporary, sums)
    if problem:
        raise JobError("StorageFailed", f"checkpoint {version}: {problem}", field=FIELD, exit_code=ExitCode.STORAGE)
    for model in sorted({file.model for file in files if file.model}):
        weights = [file for file in files if file.model == model and file.parameters]
        _index(temporary / model, weights, sums)
        _add_source_files(temporary / model, sources[model])
    paths = [item for item in temporary.rglob("*") if item.is_file()]
    described = {str(item.relative_to(temporary)): _describe(temporary, item, sums) for item in sorted(paths)}
    content = {**facts, "version": version, "iteration": version - 1, "files": described}
    (temporary / _FACTS).write_text(json.dumps(content, indent=1, sort_keys=True))
    _sync_tree(temporary)
    return Checkpoint(version, _publish(temporary, path, version))


def discover(path: Path, at_most: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest complete checkpoint of a version up to `at_most`, and a warning for each newer damaged one.

    Raises JobError.
    """
    problems: list[str] = []
    for version in versions(path):
        if at_most is not None and version > at_most:
            continue
        problem = verify(folder_of(path, version))
        if problem is None:
            return Checkpoint(version, folder_of(path, version)), problems
        problems.append(f"{folder_of(path, version)} is passed over: {problem}")
    return None, problems


def versions(path: Path) -> list[int]:
    """Return the versions that have a final folder, newest first. Raises JobError if the path cannot be read."""
    try:
        if not path.is_dir():
            return []
        matches = [_NAME.fullmatch(item.name) for item in path.iterdir() if item.is_dir()]
    except OSError as error:
        raise storage_error("the folder of checkpoints", path, error, FIELD, "read") from error
    return sorted((int(match.group(1)) for match in matches if match), reverse=True)


def verify(folder: Path) -> str | None:
    """Return the defect of a checkpoint folder; None when every file is intact."""
    try:
        content = parse_json((folder / _FACTS).read_bytes())
        sums = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in content["files"].items()}
        if folder_of(folder.parent, int(content["version"])) != folder:
            return f"{_FACTS} is of version {content['version']}"
    except OSError as error:
        return f"{_FACTS} cannot be read: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"{_FACTS} is damaged: {error!r}"
    return _mismatch(folder, sums)


def name_best(path: Path, version: int, reward: float) -> None:
    """Record in BEST_FILE which checkpoint has the best evaluation. Raises OSError."""
    facts = {"folder": folder_of(path, version).name, "version": version, "reward": reward}
    write_atomically(path / BEST_FILE, json.dumps(facts).encode() + b"\n")


def prune(path: Path, newest: int, keep: int, spared: Collection[int] = ()) -> list[int]:
    """Remove all up to version `newest` but the `keep` newest of them and those `spared`.

    Return the `keep` newest, newest first. Folders of later versions stay, and do not count.
    """
    candidates = [version for version in versions(path) if version <= newest]
    for version in (old for old in candidates[keep:] if old not in spared):
        doomed = path / f".tmp-remove-{version:06d}"
        folder_of(path, version).rename(doomed)  # never seen half-removed under its final name
        shutil.rmtree(doomed, ignore_errors=True)
    return candidates[:keep]


def remove_leftovers(path: Path) -> None:
    """Remove the folders and files whose names begin with `.tmp-`."""
    for item in path.glob(".tmp-*") if path.is_dir() else ():
        if item.is_dir() and not item.is_symlink():
            discard(item)
        else:
            with contextlib.suppress(OSError):
                item.unlink()


def _index(folder: Path, weights: Sequence[pb.CheckpointFile], sums: dict[str, tuple[int, str]]) -> None:
    """Turn the stages' files into a Hugging Face folder: an index, or the single file's usual name.

    Adapters are joined into one file. `sums` changes with the files.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        parts = [folder.parent / file.path for file in weights]
        try:
            adapter_file.join(parts, folder / ADAPTER_WEIGHTS)
        except ValueError as error:
            message = f"the adapters of {folder.name} cannot be put together: {error}"
            raise JobError("StorageFailed", message, field=FIELD, exit_code=ExitCode.STORAGE) from error
        for file, part in zip(weights, parts, strict=True):
            part.unlink()
            del sums[file.path]
        return
    if len(weights) == 1:
        name = weights[0].path
        target = folder / "model.safetensors"
        (folder.parent / name).rename(target)
        sums[str(target.relative_to(folder.parent))] = sums.pop(name)
        return
    index = {parameter: Path(file.path).name for file in weights for parameter in file.parameters}
    content = {"metadata": {"total_size": sum(file.bytes for file in weights)}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=1, sort_keys=True))


def _add_source_files(folder: Path, source: SourceFolder) -> None:
    """Copy the companion files of a source on this disk that the ranks have not written.

    Raises JobError and OSError.
    """
    local = local_folder(source.path)
    try:
        files = {name: local / name for name in companion_files(local)} if local is not None else {}
    except FolderError as error:
        message = f"{source.path}: {error}"
        raise JobError(error.reason, message, field=source.field, exit_code=ExitCode.BAD_MODEL) from error
    for name, file in files.items():
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)


def _mismatch(folder: Path, sums: Mapping[str, tuple[int, str]]) -> str | None:
    """Return the first difference of a file from its (bytes, sha256), or why it cannot be read; None without one."""
    sizes = (_wrong_size(folder, name, size) for name, (size, _) in sums.items())
    if problem := next(filter(None, sizes), None):
        return problem
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        contents = pool.map(lambda name: _wrong_content(folder, name, sums[name][1]), sums)
        return next(filter(None, contents), None)


def _wrong_size(folder: Path, name: str, size: int) -> str | None:
    try:
        if not (folder / name).is_file():
            return f"{name} is missing"
        actual = (folder / name).stat().st_size
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return f"{name} has {actual} bytes, not {size}" if actual != size else None


def _wrong_content(folder: Path, name: str, sha256: str) -> str | None:
    try:
        return f"{name} has another SHA-256" if _digest(folder / name) != sha256 else None
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"


def _describe(folder: Path, file: Path, sums: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    recorded = sums.get(str(file.relative_to(folder)))
    return {"bytes": file.stat().st_size, "sha256": recorded[1] if recorded else _digest(file)}


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync_tree(folder: Path) -> None:
    for item in folder.rglob("*"):
        if item.is_dir():
            sync_folder(item)
        else:
            with item.open("rb") as stream:
                os.fsync(stream.fileno())
    sync_folder(folder)


def _publish(temporary: Path, path: Path, version: int) -> Path:
    final = folder_of(path, version)
    damaged = path / f".tmp-damaged-{version:06d}"
    with contextlib.suppress(FileNotFoundError):
        final.rename(damaged)
    temporary.rename(final)
    sync_folder(path)
    shutil.rmtree(damaged, ignore_errors=True)
    return final
