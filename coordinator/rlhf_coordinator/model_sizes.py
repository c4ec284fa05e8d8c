"""The sizes and shapes of a job's models, from config.json and safetensors headers. No weights are loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlhf_api.algorithms import ModelKind, ModelRole
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.model_source import ModelSource
from rlhf_common.json_document import parse_json
from rlhf_common.model_files.config_counts import count_in
from rlhf_common.model_files.weight_files import FolderError, read_weight_files
from rlhf_common.names import DRAFT_MODEL
from rlhf_coordinator.model_folders import local_folder
from rlhf_planner.device_memory import ModelSize, reward_model
from rlhf_planner.tensor_split import expert_count
from rlhf_planner.transformer_shape import TransformerShape, shape_of

_UNREADABLE: Final = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
"""Errors of a config.json with missing or wrong values, such as Infinity or a list instead of an object."""


def read_sizes(spec: RLHFJobSpec) -> dict[str, ModelSize | None]:
    """Return the size of each model that a resolved job sets; None for a folder that is not on this disk or cannot be
    read.

    Keys are roles, the names of `reward_model`, and DRAFT_MODEL.
    """
    sources: dict[str, ModelSource | None] = {}
    sources |= {role: spec.models.explicit_source(role) for role in ModelRole if role.kind is not ModelKind.REWARD}
    sources |= {reward_model(reward): reward.reward.own_model for reward in spec.models.all_rewards}
    draft = spec.generation.speculation.draft_model
    paths = {name: source.path for name, source in sources.items() if source is not None}
    paths |= {DRAFT_MODEL: draft.path} if draft is not None else {}
    folders = {name: local_folder(path) for name, path in paths.items()}
    return {name: read_size(folder) if folder is not None else None for name, folder in folders.items()}


def read_size(folder: Path) -> ModelSize | None:
    """Return the size of the model in a Hugging Face folder; None when its files do not show it."""
    try:
        config = parse_json((folder / "config.json").read_text())
        tensors = read_weight_files(folder, whole=False).tensors
        parameters = sum(entry.count for entry in tensors.values())
        of_experts = sum(entry.count for name, entry in tensors.items() if ".experts." in name)
        text = config.get("text_config") or config
        layers, heads = count_in(text, "num_hidden_layers"), count_in(text, "num_attention_heads")
        key_value_heads = count_in(text, "num_key_value_heads", heads)
        experts = expert_count(text) if of_experts else 0
        return ModelSize(
            parameters, _cache_values(text), _map_widths(text), layers, key_value_heads, experts, of_experts
        )
    except (FolderError, *_UNREADABLE):
        return None


def read_shapes(spec: RLHFJobSpec) -> Mapping[str, TransformerShape]:
    """Return role -> shape of its model, for models that the manifest sets, whose config.json here states one."""
    shapes = {}
    for role in ModelRole:
        source = spec.models.explicit_source(role)
        folder = None if source is None else local_folder(source.path)
        if folder is None:
            continue
        try:
            config = parse_json((folder / "config.json").read_text())
            shapes[str(role)] = shape_of(config.get("text_config") or config)
        except _UNREADABLE:
            continue
    return shapes


def _map_widths(config: Mapping[str, Any]) -> dict[str, int]:
    """Return linear map -> its inputs plus outputs, summed over the layers; empty without a stated shape."""
    try:
        shape = shape_of(config)
    except _UNREADABLE:
        return {}
    hidden, queries, keys, inner = shape.hidden, shape.queries, shape.keys, shape.intermediate
    widths = {"q_proj": hidden + queries, "k_proj": hidden + keys, "v_proj": hidden + keys, "o_proj": queries + hidden}
    if shape.experts is None:
        widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + inner)
    return {name: width * shape.layers for name, width in widths.items()}


def _cache_values(config: Mapping[str, Any]) -> int:
    heads = count_in(config, "num_attention_heads")
    width = (
        count_in(config, "head_dim") if config.get("head_dim") is not None else count_in(config, "hidden_size") // heads
    )
    return 2 * count_in(config, "num_hidden_layers") * count_in(config, "num_key_value_heads", heads) * width
