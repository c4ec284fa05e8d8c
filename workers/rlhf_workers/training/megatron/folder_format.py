"""Conversion between a Hugging Face folder and a chunk of Megatron's GPTModel.

For each parameter of a chunk: the tensors of a folder that form it, and how.

Rule: a conversion only moves values, and pads the vocabulary, so a round trip restores every bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional

from rlhf_workers.training.parallel.tensor_parts import TensorPart, equal_part
from rlhf_workers.training.stages.pipeline_stage import EMBEDDING

Shapes = Mapping[str, torch.Size]
"""Hugging Face name -> shape of every tensor of a stage."""
_ROWS: Final = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"})
_COLUMNS: Final = frozenset({"o_proj", "down_proj"})


@dataclass(frozen=True)
class Conversion:
    """How to build one parameter of a chunk from tensors of a folder, or from a rank's parts of them, and how to split
    it."""

    names: tuple[str, ...]
    """Names of the folder's tensors, in the order of `join`'s arguments."""
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]]


def chunk_format(config: Any, layers: range, shapes: Shapes, tied_head: bool, ranks: int = 1) -> dict[str, Conversion]:
    """Return parameter name of a GPTModel chunk -> its conversion, for the tensors in `shapes`.

    `layers` are those of the chunk, which numbers its own from 0. `tied_head`: the chunk holds the embedding as its
    head. Value and score heads are not included. With several `ranks` the conversions apply to the parts of
    `tensor_part`.
    """
    plain = {
        "embedding.word_embeddings.weight": EMBEDDING,
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    if tied_head:
        plain["output_layer.weight"] = plain.pop("embedding.word_embeddings.weight")
    stacked: dict[str, Conversion] = {}
    for place, number in enumerate(layers):
        ours, theirs = f"decoder.layers.{place}", f"model.layers.{number}"
        plain |= {
            f"{ours}.input_layernorm.weight": f"{theirs}.input_layernorm.weight",
            f"{ours}.self_attention.linear_proj.weight": f"{theirs}.self_attn.o_proj.weight",
            f"{ours}.self_attention.q_layernorm.weight": f"{theirs}.self_attn.q_norm.weight",
            f"{ours}.self_attention.k_layernorm.weight": f"{theirs}.self_attn.k_norm.weight",
            f"{ours}.pre_mlp_layernorm.weight": f"{theirs}.post_attention_layernorm.weight",
            f"{ours}.mlp.linear_fc2.weight": f"{theirs}.mlp.down_proj.weight",
            f"{ours}.mlp.router.weight": f"{theirs}.mlp.gate.weight",
            f"{ours}.mlp.experts.gate_up_proj": f"{theirs}.mlp.experts.gate_up_proj",
            f"{ours}.mlp.experts.down_proj": f"{theirs}.mlp.experts.down_proj",
        }
        gate_and_up = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        stacked[f"{ours}.mlp.linear_fc1.weight"] = Conversion(gate_and_up, _rows, lambda both: both.chunk(2))
        for kind in ("weight", "bias"):
            names = tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv")
            stacked[f"{ours}.self_attention.linear_qkv.{kind}"] = _by_group(
                names, config.num_key_value_heads, shapes, ranks
            )
    result = {name: Conversion((part,), lambda parts: parts[0], lambda whole: (whole,)) for name, part in plain.items()}
    if ranks > 1:
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            if name in plain:
                result[name] = _padded(plain[name], config.vocab_size, ranks)
    return {name: item for name, item in (result | stacked).items() if all(part in shapes for part in item.names)}


def tensor_part(name: str, shape: torch.Size, rank: int, ranks: int) -> TensorPart | None:
    """Return a tensor group rank's part of a folder's tensor; None: it has all of it.

    Embedding, head, and the q, k, v, gate and up projections are split by rows; the o and down projections by columns.
    """
    owner = name.rsplit(".", 2)[-2] if "." in name else ""
    if ranks == 1 or owner not in _ROWS | _COLUMNS:
        return None
    return equal_part(shape, int(owner in _COLUMNS), rank, ranks)


def vocabulary_rows(vocabulary: int, ranks: int) -> int:
    """Return the rows of embedding and head per rank; rows after the last token are zeros."""
    return -(-vocabulary // ranks)


def unconverted(formats: Mapping[str, Conversion], shapes: Shapes) -> list[str]:
    """Return the tensors of a stage that no parameter of its chunk uses."""
    return sorted(set(shapes) - {name for item in formats.values() for name in item.names})


def _padded(name: str, vocabulary: int, ranks: int) -> Conversion:
    """Rows of the vocabulary on a rank; the last ranks, which have fewer, are padded with zeros."""
    rows = vocabulary_rows(vocabulary, ranks)

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        missing = rows - len(parts[0])
        return functional.pad(parts[0], (0, 0, 0, missing)) if missing else parts[0]

    return Conversion((name,), join, lambda whole: (whole,))


def _by_group(names: tuple[str, ...], all_groups: int, shapes: Shapes, ranks: int) -> Conversion:
    """Query, key and value rows, interleaved by query group: the queries of a group, then its key, then its value."""
    if not all(name in shapes for name in names):
        return Conversion(names, _rows, lambda whole: (whole,))  # not in the model
    rows, groups = [shapes[name][0] // all_groups for name in names], all_groups // ranks

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        grouped = whole.reshape(groups, -1, *whole.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split(rows, dim=1)]

    return Conversion(names, join, split)


def _rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the rows of the parts."""
    return torch.cat(list(parts))
