"""Reads weights from a Hugging Face folder: all files that `weight_files` lists.

Rule: reads safetensors only (never a file with code in it), and names the folder in its errors.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rlhf_common.model_files.weight_files import FolderError, read_weight_files
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError


def read_folder(field: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return parameter name -> CPU tensor; WorkError (exit code 21) if a file is missing or damaged.

    `field` is the folder's manifest path, for errors.
    """
    try:
        files = read_weight_files(folder).files
    except FolderError as error:
        raise _failure(error.reason, field, folder, str(error)) from error
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= read_file(field, folder, file)
    return tensors


def read_file(field: str, folder: Path, file: Path) -> dict[str, torch.Tensor]:
    """Return tensor name -> CPU tensor of one file; WorkError ModelCorrupt if it is missing or damaged.

    `field` is the folder's manifest path, for errors.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise _failure("ModelCorrupt", field, folder, f"{file.name}: {error}") from error


def _failure(reason: str, field: str, folder: Path, problem: str) -> WorkError:
    message = f"weights of {field} in {folder}: {problem}"
    return WorkError(reason, message, field=field, exit_code=ExitCode.BAD_MODEL)
