"""Checks that config.json and the weight files of a model folder agree, before anything is loaded.

It rejects adapters and quantised weights. For known families it also rejects wrong numbers in config.json, and layers
or a head that differ from it. Tensors are read only to compare a tied embedding and head. No torch is needed.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rlhf_common.json_document import parse_json
from rlhf_common.model_files.config_counts import count_problem
from rlhf_common.model_files.layer_tensors import layer_problem
from rlhf_common.model_files.weight_files import (
    MISSING,
    FolderError,
    TensorEntry,
    WeightFiles,
    check_index,
    read_weight_files,
)
from rlhf_common.names import ADAPTER_CONFIG, ADAPTER_FIELD

CONFIG: Final = "config.json"
TIED_BY_DEFAULT: Final[Mapping[str, bool]] = {
    "llama": False, "mistral": False, "qwen2": False, "qwen3": False, "gemma2": True, "mixtral": False,
    "qwen3_moe": False,
}  # fmt: skip
"""model_type of a family that this project trains -> whether embedding and head are one tensor if config.json does not
say, as in transformers.
"""
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
QUANTISATION_KEYS: Final = ("quantization_config", "compression_config")
QUANTISATION_FILES: Final = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files with which other tools mark weights as quantised."""
_QUANTISED_NAME: Final = re.compile(
    r"(.*\.)?(qweight|qzeros|g_idx|absmax|nested_absmax|quant_map|SCB|zero_point|scales|scale_inv|codebooks|"
    r"quant_state.*|\w+_scale_inv|\w+_scale_\d|\w+_scales|\w+_blocks|\w*_zero_point|\w+_packed|\w+_g_idx|_scale|_data|"
    r"(weight|input|output|activation|[qkv]|kv)_scale)"
)
"""Names that quantisers give to tensors with scales or packed codes."""
_NO_CODES: Final = re.compile(r".*(bias|_ids|mask)")
"""Names of integer tensors that are not codes: constants that models keep in their files."""
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16", "C64", "BOOL"})
_COMPARED_BYTES: Final = 16 * 1024 * 1024
"""Maximum bytes of each tensor to compare at a time."""


def check_model_folder(folder: Path, *, head: bool) -> None:
    """Raise FolderError for a folder that fails a check of this module. `head`: whether its language-model head is
    used."""
    refuse_adapters(folder)
    config = read_model_config(folder)
    weights = read_weight_files(folder)
    check_index(folder)
    refuse_quantised(folder, config, weights)
    if config.get("transformers_weights") is not None:
        name = config["transformers_weights"]
        raise FolderError("ModelUnsupported", f"{CONFIG} has transformers_weights {name!r}; only transformers reads it")
    if config["model_type"] not in TIED_BY_DEFAULT:
        return
    if problem := count_problem(config):
        raise FolderError("ModelCorrupt", f"{CONFIG}: {problem}")
    if problem := layer_problem(config, weights.tensors):
        raise FolderError(
            "ModelCorrupt",
            f"its weights hold {problem}, so that this tensor would be left out: correct {CONFIG}, or remove the "
            "tensor from the weights",
        )
    if head:
        _check_head(config, weights)


def refuse_adapters(folder: Path) -> None:
    """Raise FolderError for a folder with an adapter configuration."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    if (folder / CONFIG).is_file() and any(folder.glob("model*.safetensors")):
        why = "transformers would add adapters to this model, and other readers would not"
        remedy = "remove the file if the adapters are merged already, or merge them into a folder of their own"
    else:
        why = "the folder holds adapters and no model"
        remedy = f"give the folder of their base model here, and this one as {ADAPTER_FIELD}, or merge them"
    raise FolderError("ModelUnsupported", f"it holds {ADAPTER_CONFIG}: {why}; {remedy}")


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return config.json, which must name a model_type. Raises FolderError."""
    try:
        config = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FolderError(MISSING, f"it holds no {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise FolderError("ModelCorrupt", f"{CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise FolderError("ModelCorrupt", f"{CONFIG} names no model_type")
    return config


def ties_embeddings(config: Mapping[str, Any]) -> bool:
    """Return whether embedding and head are one tensor. A family without a value in TIED_BY_DEFAULT counts as untied if
    config.json does not say."""
    return bool(config.get("tie_word_embeddings", TIED_BY_DEFAULT.get(str(config.get("model_type")), False)))


def refuse_quantised(folder: Path, config: Mapping[str, Any], weights: WeightFiles) -> None:
    """Raise FolderError for a folder whose weights are quantised, or are marked as such."""
    said = [f"{CONFIG} has {key}{_method(value)}" for key, value in _quantisation(config)]
    said += [f"it holds {name}" for name in QUANTISATION_FILES if (folder / name).is_file()]
    codes = sorted(name for name, entry in weights.tensors.items() if _is_code(name, entry))
    if codes:
        entry = weights.tensors[codes[0]]
        said.append(f"{entry.file.name} holds {codes[0]} ({entry.dtype})")
        remedy = "give the folder of the model with bfloat16 or float32 weights, or convert this one to them"
        raise FolderError("ModelUnsupported", f"its weights are quantised: {' and '.join(said)}; {remedy}")
    if said:
        why = f"{' and '.join(said)}, but its weights are not quantised"
        raise FolderError("ModelCorrupt", f"{why}: remove it, so that every reader takes the weights as they are")


def _quantisation(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) about quantisation in a configuration or a nested one."""
    for key, value in config.items():
        if key in QUANTISATION_KEYS and value is not None:
            yield key, value
        elif isinstance(value, dict):
            yield from _quantisation(value)


def _method(value: Any) -> str:
    method = value.get("quant_method") if isinstance(value, dict) else None
    return f" (quant_method {method})" if method else ""


def _is_code(name: str, entry: TensorEntry) -> bool:
    """Return whether a tensor is part of quantised weights."""
    if _QUANTISED_NAME.fullmatch(name):
        return True
    if entry.dtype in _FLOATS:
        return False
    whole_number = entry.dtype[0] in "IU"
    return not (whole_number and (_NO_CODES.fullmatch(name) or not entry.shape))


def _check_head(config: Mapping[str, Any], weights: WeightFiles) -> None:
    """Raise FolderError unless the files contain the embedding, and the head that config.json describes."""
    embedding, head = weights.tensors.get(EMBEDDING), weights.tensors.get(HEAD)
    said = f"tie_word_embeddings {json.dumps(config['tie_word_embeddings'])}" if "tie_word_embeddings" in config else ""
    tied = ties_embeddings(config)
    means = said or f"no tie_word_embeddings, which is {json.dumps(tied)} for {config['model_type']}"
    if embedding is None:
        raise FolderError("ModelCorrupt", f"{EMBEDDING} is missing")
    if not tied and head is None:
        raise FolderError(
            "ModelCorrupt",
            f"{HEAD} is missing, and {CONFIG} has {means}: set tie_word_embeddings to true if the embedding is the "
            f"head, or add {HEAD} to the weights",
        )
    if tied and head is not None and not _equal(embedding, head):
        raise FolderError(
            "ModelCorrupt",
            f"{head.file.name} holds {HEAD}, which differs from {EMBEDDING}, and {CONFIG} has {means}: set "
            f"tie_word_embeddings to false if {HEAD} is the model's, or remove {HEAD} from the weights",
        )


def _equal(entry: TensorEntry, other: TensorEntry) -> bool:
    """Return whether two tensors have the same type, shape and bytes."""
    if (entry.dtype, entry.shape) != (other.dtype, other.shape):
        return False
    with entry.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(entry.start)
        second.seek(other.start)
        left = entry.end - entry.start
        while left > 0:
            size = min(left, _COMPARED_BYTES)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True
