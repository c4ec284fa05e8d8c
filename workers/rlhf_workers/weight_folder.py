"""Weights from a Hugging Face folder: safetensors files, with or without an index, complete or not at all.

Rule: reads safetensors only (a file with code in it is never opened), checks the files against the index, and names
folder and file in every error.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rlhf_api.algorithms import ModelRole
from rlhf_api.names import ExitCode
from rlhf_workers.failures import WorkError

INDEX = "model.safetensors.index.json"


def read_folder(model: str, folder: Path) -> dict[str, torch.Tensor]:
    """Parameter name -> CPU tensor; WorkError ModelCorrupt (exit code 21) when anything is missing or damaged."""
    expected = _index(model, folder)
    files = sorted({folder / name for name in expected.values()} if expected else folder.glob("*.safetensors"))
    if not files:
        raise _corrupt(model, folder, "there is no safetensors file in it")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in read_file(model, folder, file).items():
            if name in tensors:
                raise _corrupt(model, folder, f"{name} is in {file.name} and in another file")
            tensors[name] = tensor
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise _corrupt(model, folder, f"{INDEX} promises {missing[0]} (and {len(missing) - 1} more) but no file has it")
    return tensors


def _index(model: str, folder: Path) -> dict[str, str]:
    try:
        index = json.loads((folder / INDEX).read_text())["weight_map"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _corrupt(model, folder, f"{INDEX} cannot be read: {error!r}") from error
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise _corrupt(model, folder, f"{INDEX}: weight_map must map parameter names to file names")
    outside = [name for name in index.values() if Path(name).name != name]
    if outside:
        raise _corrupt(model, folder, f"{INDEX} points outside the folder: {outside[0]!r}")
    return index


def read_file(model: str, folder: Path, file: Path) -> dict[str, torch.Tensor]:
    """Tensor name -> CPU tensor of one file; WorkError ModelCorrupt when it is missing or damaged."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise _corrupt(model, folder, f"{file.name}: {error}") from error


def _corrupt(model: str, folder: Path, what: str) -> WorkError:
    message = f"weights of {model} in {folder}: {what}"
    return WorkError(
        "ModelCorrupt", message, field=f"{ModelRole(model).manifest_path}.path", exit_code=ExitCode.BAD_MODEL
    )
