"""A pipeline stage whose layers are a chunk of Megatron's GPTModel.

Rule: a stage computes the same as the Hugging Face model, except for rounding. Models that Megatron would compute
otherwise are rejected with the reason. States are [b, L, hidden] between stages and [L, b, hidden] inside a chunk.
"""

import math
from collections.abc import Iterator
from typing import Any, Final

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhf_common.names import ExitCode
from rlhf_planner.transformer_shape import stage_layers
from rlhf_workers.failures import WorkError
from rlhf_workers.models.experts import has_experts
from rlhf_workers.training.batches.packed_rows import PackedRow
from rlhf_workers.training.megatron.chunk_modules import build_chunk
from rlhf_workers.training.megatron.folder_format import Shapes, chunk_format, tensor_part, unconverted
from rlhf_workers.training.parallel.context_attention import ChunkMasks
from rlhf_workers.training.parallel.context_group import ContextCut
from rlhf_workers.training.parallel.expert_group import ExpertGroup
from rlhf_workers.training.parallel.expert_stage import SharedExperts
from rlhf_workers.training.parallel.sequence_parallel import divided_sum, own_positions, whole_rows
from rlhf_workers.training.parallel.tensor_group import TensorGroup
from rlhf_workers.training.parallel.tensor_parts import TensorPart, equal_part, near_equal_keepers
from rlhf_workers.training.stages.model_stages import ModelStage
from rlhf_workers.training.stages.pipeline_stage import (
    SCORE_HEAD,
    VALUE_HEAD,
    Attention,
    Head,
    PipelineStage,
    Reader,
)
from rlhf_workers.weights.expert_files import NAMES, as_parameters
from rlhf_workers.weights.tensor_file import TensorFolder

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", *NAMES)
"""`model_type`s that this backend accepts."""
ROTATIONS: Final = ("default", "linear", "llama3")
"""Kinds of rotary embedding that this backend accepts."""
CHUNK: Final = "chunk."
"""Prefix of a chunk's own parameter names."""
OF_HEADS: Final = ("q_layernorm.weight", "k_layernorm.weight")
"""Suffixes of parameters that every head uses; a rank of a tensor group has some of the heads."""
TENSOR_FIELD: Final = "spec.training.parallelism.tensor"


class MegatronStage(PipelineStage):
    """Parameter names are `chunk.` and Megatron's, except for value and score heads."""

    def __init__(
        self, reference: ModelStage, stages_after: int, attention: Attention, tensor: TensorGroup | None = None
    ) -> None:
        """`reference`: the same stage of the Hugging Face model, on the meta device."""
        super().__init__(reference.config, reference.layer_numbers, stages_after, reference.head, tensor)
        tensor, self.keepers, self.whole_tensors = self.tensor, {}, {}
        self._shapes: Shapes = {name: part.shape for name, part in reference.named_parameters()}
        shared = self.tied and self.is_first and self.is_last
        routed = [f"model.layers.{number}.mlp.gate.weight" in self._shapes for number in self.layer_numbers]
        self.chunk: Any = build_chunk(self.config, routed, self.is_first, self.is_last, shared, attention, tensor)
        self._has_experts = any(routed)
        if self.is_last and self.head != "lm":
            del self.chunk.output_layer
        tied_head = self.tied and not self.is_first
        self._formats = chunk_format(self.config, self.layer_numbers, self._shapes, tied_head, tensor.size)
        self.embedding = CHUNK + ("output_layer.weight" if tied_head else "embedding.word_embeddings.weight")
        self.rotary = reference.rotary
        self._put_on_head()
        if tensor.size > 1:
            self.replicated = frozenset(name for name, _ in self.named_parameters() if self._is_replicated(name))
            self.used_in_parts = frozenset(name for name in self.replicated if self._is_used_in_parts(name))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """See PipelineStage. Each rank of a tensor group embeds the tokens of its rows. The padding row has no
        gradient, as in transformers."""
        weight, padding_id = self.chunk.embedding.word_embeddings.weight, self.config.pad_token_id
        padding: int | None = None if padding_id is None else padding_id % self.config.vocab_size  # -1 is the last row
        if self.tensor.size == 1:
            return nn.functional.embedding(tokens, weight, padding).float()
        first = self.tensor.rank * len(weight)
        own = tokens - first
        in_range = (own >= 0) & (own < len(weight))
        at = padding - first if padding is not None and first <= padding < first + len(weight) else None
        embedded = (
            nn.functional.embedding(own.where(in_range, 0), weight, at).float().masked_fill(~in_range[..., None], 0.0)
        )
        if not self.tensor.by_position:
            return self.tensor.summed(embedded)
        missing = self.own_positions(tokens.shape[1]) * self.tensor.size - tokens.shape[1]
        padded = nn.functional.pad(embedded, (0, 0, 0, missing)).transpose(0, 1)
        return divided_sum(padded, self.tensor).transpose(0, 1).contiguous()

    def own_positions(self, length: int) -> int:
        """See PipelineStage."""
        return own_positions(length, self.tensor) if self.tensor.by_position else length

    def forward(
        self, hidden: torch.Tensor, packed: PackedRow | None = None, cut: ContextCut | None = None
    ) -> torch.Tensor:
        """See PipelineStage."""
        assert packed is None, "a rule refuses packing with this backend"
        by_position = self.tensor.by_position
        rotation, masks = self._of_rows(hidden, cut)
        hidden = hidden.transpose(0, 1)
        if self._has_experts:  # Megatron treats its tokens as rows of one matrix, without a copy
            hidden = hidden.contiguous()
        for layer, kind in zip(self.chunk.decoder.layers, self._sliding(), strict=True):
            arguments = {"attention_mask": masks[kind], "rotary_pos_emb": rotation}
            if self.recompute:
                hidden, _ = checkpoint(layer, hidden, use_reentrant=False, **arguments)
            else:
                hidden, _ = layer(hidden, **arguments)
        if self.is_last:
            normed: torch.Tensor = self.chunk.decoder.final_layernorm(hidden)
            return (whole_rows(normed, self.tensor) if by_position else normed).transpose(0, 1)
        # Contiguous memory for the transfer; also, a split backward detaches it, which fails for a view.
        return hidden.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def _of_rows(self, hidden: torch.Tensor, cut: ContextCut | None) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the rotations of this rank's positions, and the mask per attention kind."""
        if cut is None:
            return self._geometry(hidden, hidden.shape[1] * (self.tensor.size if self.tensor.by_position else 1))
        assert not self.tensor.by_position, "a rule refuses sequence parallelism with context parallelism"
        with torch.no_grad():
            rotation = self._rotation(hidden, max(cut.lengths)).index_select(0, cut.positions)
            masks = ChunkMasks.by_kind(cut, self._windows(), self.config._attn_implementation, hidden)
        return rotation, dict(masks)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See PipelineStage. Every rank of a tensor group returns all logits and computes those of its rows."""
        shared = self.tied and self.is_first
        weight = self.chunk.embedding.word_embeddings.weight if shared else self.chunk.output_layer.weight
        logits = self.tensor.joined(nn.functional.linear(self.tensor.shared(hidden), weight))
        return logits[..., : self.config.vocab_size] if logits.shape[-1] > self.config.vocab_size else logits

    def in_folder(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """See PipelineStage."""
        if name in (VALUE_HEAD, SCORE_HEAD):
            yield name, tensor
            return
        conversion = self._formats[name.removeprefix(CHUNK)]
        for folder_name, value in zip(conversion.names, conversion.split(tensor), strict=True):
            part = self.part_of(folder_name)
            yield folder_name, value if part is None else value.narrow(part.dimension, 0, part.length)

    def of_folder(self, name: str, read: Reader) -> torch.Tensor:
        """See PipelineStage."""
        if name in (VALUE_HEAD, SCORE_HEAD):
            return super().of_folder(name, read)
        conversion = self._formats[name.removeprefix(CHUNK)]
        return conversion.join([self._own(part, read(part, self._shapes[part])) for part in conversion.names])

    def part_of(self, name: str, rank: int | None = None) -> TensorPart | None:
        """See PipelineStage."""
        if name in (VALUE_HEAD, SCORE_HEAD):
            return None
        return tensor_part(name, self._shapes[name], self.tensor.rank if rank is None else rank, self.tensor.size)

    def _own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        part = self.part_of(name)
        return whole if part is None else part.cut(whole)

    def _is_used_in_parts(self, name: str) -> bool:
        if self.tensor.by_position and name not in (VALUE_HEAD, SCORE_HEAD):  # norms, each over a rank's own positions
            return True
        return name.endswith(OF_HEADS)

    def _is_replicated(self, name: str) -> bool:
        conversion = self._formats.get(name.removeprefix(CHUNK))
        return conversion is None or all(self.part_of(part) is None for part in conversion.names)

    def keep_whole(self, tensors: TensorFolder) -> None:
        """Keep this rank's share of the whole tensors for readers: as in the files, or as this rank holds them if every
        rank has them whole."""
        owned = {name: value for name, value in self.named_parameters() if name not in self.duplicates}
        found = {part: own for name, value in owned.items() for part, own in self.in_folder(name, value.detach())}
        sizes = {name: self._shapes[name].numel() if name in self._shapes else found[name].numel() for name in found}
        self.keepers, self.whole_tensors = near_equal_keepers(sizes, self.tensor.size), {}
        for name, own in found.items():
            if self.keepers[name] == self.tensor.rank:
                whole = own if self.part_of(name) is None else tensors.read(name, self._shapes[name])
                self.whole_tensors[name] = whole.to(own.device, torch.float32, copy=True)

    def difference(self) -> str:
        """Return how tensors of the Hugging Face model and the chunk differ, in names or shapes; empty: not at all."""
        own = {name.removeprefix(CHUNK): part.shape for name, part in self.named_parameters()}
        heads = {name for name in (VALUE_HEAD, SCORE_HEAD) if name in self._shapes}
        if missing := sorted(set(unconverted(self._formats, self._shapes)) - heads):
            return f"it has {missing[0]}, which Megatron's layers have not"
        if missing := sorted(set(own) ^ (set(self._formats) | heads)):
            return f"it has nothing for {missing[0]} of Megatron's layers"
        for name, conversion in self._formats.items():
            parts = [self._own(part, torch.empty(self._shapes[part], device="meta")) for part in conversion.names]
            if (shape := conversion.join(parts).shape) != own[name]:
                return f"{', '.join(conversion.names)} make {list(shape)}, and {name} is {list(own[name])}"
        return ""

    def _rotation(self, hidden: torch.Tensor, length: int) -> torch.Tensor:
        """Return angles [L, 1, 1, width], from which Megatron computes sine and cosine."""
        positions = torch.arange(length, device=hidden.device, dtype=torch.float32)
        angles = torch.outer(positions, self.rotary.inv_freq.float())
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class MegatronExpertStage(SharedExperts, MegatronStage):
    """A stage whose experts are divided over the ranks of a group, with one rank per tensor group."""

    _shared = False

    def share_out(self, group: ExpertGroup) -> None:
        """See SharedExperts."""
        super().share_out(group)
        self._shared = True

    def part_of(self, name: str, rank: int | None = None) -> TensorPart | None:
        """See PipelineStage; of the expert group."""
        if not self._shared or not self.in_parts(name):
            return None
        return equal_part(self._shapes[name], 0, self.group.rank if rank is None else rank, len(self.group.ranks))

    def _own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole  # `own` cuts this rank's part from a whole parameter


def build_megatron_stage(
    config: Any,
    tensors: TensorFolder,
    stages: int,
    stage: int,
    head: Head,
    device: torch.device,
    attention: Attention,
    tensor: TensorGroup | None = None,
    keeps: bool = False,
    split_by: str = TENSOR_FIELD,
    experts: ExpertGroup | None = None,
) -> MegatronStage:
    """Return one stage on `device` with float32 master weights, read from `tensors`; in a tensor group this rank's
    parts.

    `keeps`: also its share of whole tensors. `experts`: the ranks that divide the experts.

    Raises WorkError ModelUnsupported if Megatron's layers would compute another model, and errors of
    `PipelineStage.fill`.
    """
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
    layers = stage_layers(config.num_hidden_layers, stages, stage)
    after = stages - 1 - stage
    if config.model_type not in FAMILIES:
        raise _unsupported(tensors.field, f"it is of model_type {config.model_type!r}", f"takes {', '.join(FAMILIES)}")
    if config.hidden_act != "silu":
        raise _unsupported(tensors.field, f"its hidden_act is {config.hidden_act!r}", "takes silu")
    kind = skeleton.model.rotary_emb.rope_type
    if kind not in ROTATIONS:
        raise _unsupported(tensors.field, f"its rotary embedding is {kind!r}", f"takes {', '.join(ROTATIONS)}")
    if tensor is not None:
        _require_parts(config, tensors.field, tensor.size, split_by)
    make = MegatronStage if experts is None else MegatronExpertStage
    built = make(ModelStage(skeleton, layers, after, head), after, attention, tensor)
    if problem := built.difference():
        raise _unsupported(tensors.field, problem, "computes models without it")
    if experts is not None and isinstance(built, SharedExperts):
        built.share_out(experts)
    built.to_empty(device=device)
    skeleton._init_weights(built.rotary)  # frequencies that no file contains
    built.fill(as_parameters(tensors, config.model_type))
    if keeps:
        built.keep_whole(tensors)
    built.eval()
    built.requires_grad_()
    return built


def _require_parts(config: Any, field: str, ranks: int, split_by: str) -> None:
    """Raise WorkError if a tensor group cannot have equal parts: unlike the vocabulary, heads and columns are not
    padded, and experts are not split."""
    counts = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "columns of its feed-forward layers": config.intermediate_size,
    }
    if ranks > 1 and has_experts(config):
        raise WorkError(
            "ModelUnsupported",
            f"{split_by}: {ranks}: the model of {field} has experts, which are not split: use 1",
            field=split_by,
            exit_code=ExitCode.BAD_MODEL,
        )
    wrong = [f"{count} {part}" for part, count in counts.items() if count % ranks]
    if wrong:
        common = math.gcd(*counts.values())
        raise WorkError(
            "ModelUnsupported",
            f"{split_by}: {ranks}: the model of {field} has {' and '.join(wrong)}, which do not divide by "
            f"{ranks}: use {common & -common}",
            field=split_by,
            exit_code=ExitCode.BAD_MODEL,
        )


def _unsupported(field: str, why: str, instead: str) -> WorkError:
    return WorkError(
        "ModelUnsupported",
        f"{field}: {why}: spec.training.backend megatron {instead}; use torch",
        field=field,
        exit_code=ExitCode.BAD_MODEL,
    )
