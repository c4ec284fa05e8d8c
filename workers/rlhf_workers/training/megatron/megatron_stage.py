"""A pipeline stage whose layers are a chunk of Megatron's GPTModel.

Rule: what a stage computes equals the Hugging Face model's but for the rounding of another order of the same
operations; what Megatron would compute otherwise is refused, and names what the folder has. States are [b, L, hidden]
between stages, as everywhere here, and [L, b, hidden] inside a chunk, as Megatron has them.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhf_api.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.training.megatron.chunk_modules import build_chunk
from rlhf_workers.training.megatron.folder_format import Shapes, chunk_format, unconverted
from rlhf_workers.training.model_stages import ModelStage
from rlhf_workers.training.pipeline_stage import (
    SCORE_HEAD,
    VALUE_HEAD,
    Attention,
    Head,
    PipelineStage,
    Reader,
    stage_layers,
)
from rlhf_workers.training.tensor_file import TensorFolder

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose chunks are tested to equal the whole model."""
ROTATIONS: Final = ("default", "linear", "llama3")
"""Kinds of rotary embedding whose frequencies depend on nothing but the configuration, and that scale nothing else."""
CHUNK: Final = "chunk."
"""Before a chunk's own names of its parameters."""


class MegatronStage(PipelineStage):
    """Parameter names are `chunk.` and Megatron's, but for heads that no language model has."""

    def __init__(self, reference: ModelStage, stages_after: int, attention: Attention) -> None:
        """`reference`: the same stage of the Hugging Face model, on the meta device."""
        super().__init__(reference.config, reference.layer_numbers, stages_after, reference.head)
        self._shapes: Shapes = {name: part.shape for name, part in reference.named_parameters()}
        shared = self.tied and self.is_first and self.is_last
        layers = len(self.layer_numbers)
        self.chunk: Any = build_chunk(self.config, layers, self.is_first, self.is_last, shared, attention)
        if self.is_last and self.head != "lm":
            del self.chunk.output_layer
        tied_head = self.tied and not self.is_first
        self._formats = chunk_format(self.config, self.layer_numbers, self._shapes, tied_head)
        self.embedding = CHUNK + ("output_layer.weight" if tied_head else "embedding.word_embeddings.weight")
        self.rotary = reference.rotary
        self._put_on_head()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """See PipelineStage."""
        return nn.functional.embedding(tokens, self.chunk.embedding.word_embeddings.weight).float()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """See PipelineStage."""
        rotation, masks = self._geometry(hidden)
        hidden = hidden.transpose(0, 1)
        for layer, kind in zip(self.chunk.decoder.layers, self._sliding(), strict=True):
            arguments = {"attention_mask": masks[kind], "rotary_pos_emb": rotation}
            if self.recompute:
                hidden, _ = checkpoint(layer, hidden, use_reentrant=False, **arguments)
            else:
                hidden, _ = layer(hidden, **arguments)
        if self.is_last:
            normed: torch.Tensor = self.chunk.decoder.final_layernorm(hidden).transpose(0, 1)
            return normed
        # Sent as one piece of memory; and a split backward detaches it, which a view cannot be.
        return hidden.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See PipelineStage."""
        shared = self.tied and self.is_first
        weight = self.chunk.embedding.word_embeddings.weight if shared else self.chunk.output_layer.weight
        return nn.functional.linear(hidden, weight)

    def in_folder(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """See PipelineStage."""
        if name in (VALUE_HEAD, SCORE_HEAD):
            yield name, tensor
            return
        conversion = self._formats[name.removeprefix(CHUNK)]
        yield from zip(conversion.names, conversion.split(tensor), strict=True)

    def of_folder(self, name: str, read: Reader) -> torch.Tensor:
        """See PipelineStage."""
        if name in (VALUE_HEAD, SCORE_HEAD):
            return super().of_folder(name, read)
        conversion = self._formats[name.removeprefix(CHUNK)]
        return conversion.join([read(part, self._shapes[part]) for part in conversion.names])

    def difference(self) -> str:
        """Return what the Hugging Face model has and the chunk has not, or the other way around; empty: nothing."""
        own = {name.removeprefix(CHUNK): part.shape for name, part in self.named_parameters()}
        heads = {name for name in (VALUE_HEAD, SCORE_HEAD) if name in self._shapes}
        if missing := sorted(set(unconverted(self._formats, self._shapes)) - heads):
            return f"it has {missing[0]}, which Megatron's layers have not"
        if missing := sorted(set(own) ^ (set(self._formats) | heads)):
            return f"it has nothing for {missing[0]} of Megatron's layers"
        for name, conversion in self._formats.items():
            parts = [torch.empty(self._shapes[part], device="meta") for part in conversion.names]
            if (shape := conversion.join(parts).shape) != own[name]:
                return f"{', '.join(conversion.names)} make {list(shape)}, and {name} is {list(own[name])}"
        return ""

    def _rotation(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return angles [L, 1, 1, width], of which Megatron takes sine and cosine."""
        positions = torch.arange(hidden.shape[1], device=hidden.device, dtype=torch.float32)
        angles = torch.outer(positions, self.rotary.inv_freq.float())
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def build_megatron_stage(
    config: Any,
    tensors: TensorFolder,
    stages: int,
    stage: int,
    head: Head,
    device: torch.device,
    attention: Attention,
) -> MegatronStage:
    """Return one stage on `device` with float32 master weights, read from `tensors`.

    WorkError ModelUnsupported when Megatron's layers would compute another model, and as `PipelineStage.fill`.
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
    built = MegatronStage(ModelStage(skeleton, layers, after, head), after, attention)
    if problem := built.difference():
        raise _unsupported(tensors.field, problem, "computes models without it")
    built.to_empty(device=device)
    skeleton._init_weights(built.rotary)  # frequencies that no file holds
    built.fill(tensors)
    built.eval()
    built.requires_grad_()
    return built


def _unsupported(field: str, why: str, instead: str) -> WorkError:
    return WorkError(
        "ModelUnsupported",
        f"{field}: {why}: spec.training.backend megatron {instead}; use torch",
        field=field,
        exit_code=ExitCode.BAD_MODEL,
    )
