"""A model of a checkpoint as a folder with the names that a hub expects, made whole or not at all.

Shards get Hugging Face's names, and an index of their own; weights are copied bit by bit. Tokenizer, chat template and
configuration are those of the checkpoint. It is made beside its place under a hidden name and renamed, so a process
that dies leaves nothing under the name that was asked for.
"""

import json
import shutil
import struct
from pathlib import Path
from typing import Any, Final

from rlhf_api.algorithms import ModelKind
from rlhf_api.names import ADAPTER_CONFIG, ExitCode
from rlhf_cli.hub.model_card import ExportedModel, generation_config, model_card
from rlhf_cli.local.errors import RunError

INDEX: Final = "model.safetensors.index.json"
CARD: Final = "README.md"
GENERATION: Final = "generation_config.json"
MAX_HEADER_BYTES: Final = 100 * 1024 * 1024
"""Of a safetensors file; the format's own limit."""


def check_target(folder: Path) -> None:
    """Raise RunError for a folder that cannot be made."""
    if folder.is_dir() and any(folder.iterdir()):
        raise RunError(f"--to {folder}: is not empty; give a new folder, or empty it first")
    if folder.exists() and not folder.is_dir():
        raise RunError(f"--to {folder}: is a file; give a new folder")
    if not folder.absolute().parent.is_dir():
        raise RunError(f"--to {folder}: there is no folder {folder.absolute().parent}; make it first, or give another")


def write_hub_folder(source: Path, target: Path, model: ExportedModel) -> None:
    """Write the model of the checkpoint's folder `source` to `target`. Raises RunError when the disk does not take
    it."""
    target = target.absolute()
    temporary = target.with_name(f".tmp-{target.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for item, name in _named(source).items():
            shutil.copyfile(item, temporary / name)
        _index(source, temporary)
        if not model.adapters and model.role.kind is ModelKind.POLICY and not (temporary / GENERATION).exists():
            config = json.loads((source / "config.json").read_bytes())
            (temporary / GENERATION).write_text(json.dumps(generation_config(model.job, config), indent=2) + "\n")
        (temporary / CARD).write_text(model_card(model), encoding="utf-8")
        temporary.rename(target)
    except OSError as error:
        raise RunError(f"--to {target}: {error.strerror or error}", ExitCode.STORAGE) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_adapter(folder: Path) -> bool:
    """Return whether a model's folder holds adapters."""
    return (folder / ADAPTER_CONFIG).is_file()


def _named(source: Path) -> dict[Path, str]:
    """Return the files of a model's folder that are taken, and the name that each gets."""
    files = sorted(item for item in source.iterdir() if item.is_file() and item.name not in (INDEX, CARD))
    shards = [item for item in files if item.name.startswith("model-stage-")]
    names = {item: f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number, item in enumerate(shards, 1)}
    return {item: names.get(item, item.name) for item in files}


def _index(source: Path, target: Path) -> None:
    """Write the index of several shards, under their new names."""
    if not (source / INDEX).is_file():
        return
    names = {item.name: name for item, name in _named(source).items()}
    weights: dict[str, str] = json.loads((source / INDEX).read_bytes())["weight_map"]
    total = sum(_tensor_bytes(target / names[shard]) for shard in sorted(set(weights.values())))
    index: dict[str, Any] = {
        "metadata": {"total_size": total},
        "weight_map": {parameter: names[shard] for parameter, shard in sorted(weights.items())},
    }
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _tensor_bytes(file: Path) -> int:
    """Return how many bytes of a safetensors file are tensors. Raises RunError for a damaged one."""
    with file.open("rb") as stream:
        beginning = stream.read(8)
    length = struct.unpack("<Q", beginning)[0] if len(beginning) == 8 else MAX_HEADER_BYTES + 1
    size = file.stat().st_size - 8 - length
    if length > MAX_HEADER_BYTES or size < 0:
        raise RunError(f"RUN: {file.name} is no whole safetensors file", ExitCode.BAD_MODEL)
    return int(size)
