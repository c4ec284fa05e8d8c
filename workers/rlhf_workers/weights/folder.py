"""Reads weights from a Hugging Face folder: all files that `weight_files` lists.

Rule: reads safetensors only (never a file with code in it), and names the folder in its errors.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rlhf_api.algorithms.roles import folder_field
from rlhf_common.model_files.weight_files import FolderError, read_weight_files
from rlhf_common.names import ADAPTER_FIELD, ExitCode
from rlhf_workers.failures import WorkError


def read_folder(model: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return parameter name -> CPU tensor; WorkError (exit code 21) if a file is missing or damaged."""
    try:
        files = read_weight_files(folder).files
    except FolderError as error:
        raise _failure(error.reason, model, folder, str(error)) from error
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= read_file(model, folder, file)
    return tensors


def read_file(model: str, folder: Path, file: Path) -> dict[str, torch.Tensor]:
    """Return tensor name -> CPU tensor of one file; WorkError ModelCorrupt if it is missing or damaged.

    `model`: a role, the draft model, or ADAPTER_FIELD.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise _failure("ModelCorrupt", model, folder, f"{file.name}: {error}") from error


def _failure(reason: str, model: str, folder: Path, problem: str) -> WorkError:
    message = f"weights of {model} in {folder}: {problem}"
    field = model if model == ADAPTER_FIELD else folder_field(model)
    return WorkError(reason, message, field=field, exit_code=ExitCode.BAD_MODEL)
