"""How large the models of a job are, from config.json and safetensors headers alone.

Rule: nothing is loaded; a model that is not on this disk (a hub id that is not in the cache) is unknown, not zero.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlhf_api.algorithms import ModelRole
from rlhf_api.job import RLHFJobSpec
from rlhf_coordinator.model_folders import local_folder
from rlhf_planner.device_memory import ModelSize

_MAX_HEADER: Final = 100 * 1024 * 1024
"""Bytes of a safetensors header, as the format's own library limits it."""


def read_sizes(spec: RLHFJobSpec) -> dict[ModelRole, ModelSize | None]:
    """Return the size of the model of every role that has one, by role; `spec` is of a resolved job."""
    sources = {role: spec.models.given(role) for role in ModelRole}
    folders = {role: local_folder(source.path) for role, source in sources.items() if source is not None}
    return {role: read_size(folder) if folder is not None else None for role, folder in folders.items()}


def read_size(folder: Path) -> ModelSize | None:
    """Return the size of a Hugging Face folder; None when it is not on this disk or not readable as one."""
    try:
        config = json.loads((folder / "config.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            return None
        parameters = sum(_parameters(file) for file in files)
        return ModelSize(parameters, _cache_values(config.get("text_config") or config))
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def _parameters(file: Path) -> int:
    """Return the number of values in a safetensors file: eight bytes of length, a JSON header, the data."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _MAX_HEADER:
            raise ValueError(f"{file}: header of {length} bytes")
        header = json.loads(stream.read(length))
    return sum(_product(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _product(shape: Sequence[int]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def _cache_values(config: Mapping[str, Any]) -> int:
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    return 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * width
