"""A model of a checkpoint as a folder with the names that a hub expects.

The folder is written under a hidden name beside its target and then renamed, so a process that dies leaves nothing
under the target's name.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from rlhf_api.algorithms import ModelKind
from rlhf_cli.hub.model_card import ExportedModel, generation_config, model_card
from rlhf_cli.local.errors import RunError
from rlhf_common.model_files.weight_files import INDEX, FolderError, read_weight_files
from rlhf_common.names import ADAPTER_CONFIG, ExitCode

CARD: Final = "README.md"
GENERATION: Final = "generation_config.json"


def check_target(folder: Path) -> None:
    """Raise RunError for a folder that is not empty, is a file, or has no parent folder."""
    if folder.is_dir() and any(folder.iterdir()):
        raise RunError(f"--to {folder}: is not empty; give a new folder, or empty it first")
    if folder.exists() and not folder.is_dir():
        raise RunError(f"--to {folder}: is a file; give a new folder")
    if not folder.absolute().parent.is_dir():
        raise RunError(f"--to {folder}: there is no folder {folder.absolute().parent}; make it first, or give another")


def write_hub_folder(source: Path, target: Path, model: ExportedModel) -> None:
    """Write the model of the checkpoint's folder `source` to `target`. Raises RunError when writing to the disk fails,
    or the weight files are damaged.
    """
    target = target.absolute()
    temporary = target.with_name(f".tmp-{target.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for item, name in _named(source).items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
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
    """Return whether a model's folder contains adapters."""
    return (folder / ADAPTER_CONFIG).is_file()


def _named(source: Path) -> dict[Path, str]:
    """Return the files of a model's folder that are copied, with the new name of each."""
    named = {item: str(item.relative_to(source)) for item in sorted(source.rglob("*")) if item.is_file()}
    shards = [item for item, name in named.items() if name.startswith("model-stage-")]
    names = {item: f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number, item in enumerate(shards, 1)}
    return {item: names.get(item, name) for item, name in named.items() if name not in (INDEX, CARD)}


def _index(source: Path, target: Path) -> None:
    """Write the index of renamed shards, if the source has an index."""
    if not (source / INDEX).is_file():
        return
    names = {item.name: name for item, name in _named(source).items()}
    weights: dict[str, str] = json.loads((source / INDEX).read_bytes())["weight_map"]
    renamed = {parameter: names[shard] for parameter, shard in sorted(weights.items())}
    (target / INDEX).write_text(json.dumps({"weight_map": renamed}))
    try:
        tensors = read_weight_files(target).tensors
    except FolderError as error:
        raise RunError(f"RUN: {error}", ExitCode.BAD_MODEL) from error
    total = sum(entry.end - entry.start for entry in tensors.values())
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": renamed}
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
