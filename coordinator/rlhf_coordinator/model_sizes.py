"""How large the models of a job are, from config.json and safetensors headers alone.

Rule: nothing is loaded; a model that is not on this disk (a hub id that is not in the cache) is unknown, not zero.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlhf_api.algorithms import ModelKind, ModelRole
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.model_source import ModelSource
from rlhf_api.names import DRAFT_MODEL
from rlhf_coordinator.model_folders import local_folder
from rlhf_planner.device_memory import ModelSize, reward_model
from rlhf_planner.tensor_split import expert_count
from rlhf_planner.transformer_shape import shape_of

_MAX_HEADER: Final = 100 * 1024 * 1024
"""Bytes of a safetensors header, as the format's own library limits it."""


def read_sizes(spec: RLHFJobSpec) -> dict[str, ModelSize | None]:
    """Return the size of the model of every role that has one, of each of several rewards that is a model, and of the
    draft model, as `rlhf_planner.device_memory` names them; `spec` is of a resolved job."""
    sources: dict[str, ModelSource | None] = {}
    sources |= {role: spec.models.given(role) for role in ModelRole if role.kind is not ModelKind.REWARD}
    sources |= {reward_model(reward): reward.reward.own_model for reward in spec.models.all_rewards}
    draft = spec.generation.speculation.draft_model
    paths = {name: source.path for name, source in sources.items() if source is not None}
    paths |= {DRAFT_MODEL: draft.path} if draft is not None else {}
    folders = {name: local_folder(path) for name, path in paths.items()}
    return {name: read_size(folder) if folder is not None else None for name, folder in folders.items()}


def read_size(folder: Path) -> ModelSize | None:
    """Return the size of a Hugging Face folder; None when it is not on this disk or not readable as one."""
    try:
        config = json.loads((folder / "config.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            return None
        counted = [_parameters(file) for file in files]
        parameters, of_experts = (sum(counts) for counts in zip(*counted, strict=True))
        text = config.get("text_config") or config
        layers, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
        key_value_heads = int(text.get("num_key_value_heads") or heads)
        experts = expert_count(text) if of_experts else 0
        return ModelSize(
            parameters, _cache_values(text), _map_widths(text), layers, key_value_heads, experts, of_experts
        )
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def _parameters(file: Path) -> tuple[int, int]:
    """Return the number of values in a safetensors file, and of experts' among them: eight bytes of length, a JSON
    header, the data."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _MAX_HEADER:
            raise ValueError(f"{file}: header of {length} bytes")
        header = json.loads(stream.read(length))
    sizes = {name: _product(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if ".experts." in name)


def _product(shape: Sequence[int]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def _map_widths(config: Mapping[str, Any]) -> dict[str, int]:
    """Return inputs and outputs of each linear map, over all layers; none where the configuration does not say them."""
    try:
        shape = shape_of(config)
    except (KeyError, TypeError, ValueError):
        return {}
    hidden, queries, keys, inner = shape.hidden, shape.queries, shape.keys, shape.intermediate
    widths = {"q_proj": hidden + queries, "k_proj": hidden + keys, "v_proj": hidden + keys, "o_proj": queries + hidden}
    if shape.experts is None:  # experts have no adapters
        widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + inner)
    return {name: width * shape.layers for name, width in widths.items()}


def _cache_values(config: Mapping[str, Any]) -> int:
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    return 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * width
