"""Cuts a Hugging Face causal language model into pipeline stages with its parameter names.

A stage holds its own layers; the first also the embedding, the last the final norm and its head.

Rule: batches are padded on the right, so a causal mask is enough. Modules stay in eval mode.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhf_api.job import RLHFJob
from rlhf_common.names import ExitCode
from rlhf_planner.transformer_shape import stage_layers
from rlhf_workers.failures import WorkError
from rlhf_workers.models.experts import WHOLE
from rlhf_workers.training.batches.packed_rows import PackedRow
from rlhf_workers.training.parallel.context_attention import CONTEXT, CUT, ChunkMasks
from rlhf_workers.training.parallel.context_group import ContextCut
from rlhf_workers.training.stages.packed_attention import PACKED, PACKED_ROWS, WRITTEN_OUT, RowAttention, repeated
from rlhf_workers.training.stages.pipeline_stage import Attention, Head, PipelineStage
from rlhf_workers.weights.expert_files import NAMES, as_parameters
from rlhf_workers.weights.tensor_file import TensorFolder

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma2", *NAMES)
"""`model_type`s that training accepts."""


class ModelStage(PipelineStage):
    """Parameter names are Hugging Face's, except for a value head and adapters."""

    def __init__(self, skeleton: Any, layers: range, stages_after: int, head: Head) -> None:
        """Take the needed modules from `skeleton` (on the meta device); they have no memory yet."""
        super().__init__(skeleton.config, layers, stages_after, head)
        self.model: Any = nn.Module()
        if self.is_first or (self.is_last and self.tied):
            self.model.embed_tokens = skeleton.model.embed_tokens
        self.model.layers = nn.ModuleDict({str(number): skeleton.model.layers[number] for number in layers})
        self.rotary = skeleton.model.rotary_emb
        if self.is_last:
            self.model.norm = skeleton.model.norm
            if head == "lm" and not self.tied:
                self.lm_head: Any = skeleton.lm_head
        self._put_on_head()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """See PipelineStage."""
        embedded: torch.Tensor = self.model.embed_tokens(tokens)
        return embedded.float()

    def forward(
        self, hidden: torch.Tensor, packed: PackedRow | None = None, cut: ContextCut | None = None
    ) -> torch.Tensor:
        """See PipelineStage."""
        by_kind = self._whole_rows(hidden, packed) if cut is None else self._cut_rows(hidden, cut)
        for layer, sliding in zip(self.model.layers.values(), self._sliding(), strict=True):
            arguments = by_kind[sliding]
            if self.recompute:
                hidden = checkpoint(layer, hidden, use_reentrant=False, **arguments)
            else:
                hidden = layer(hidden, **arguments)
        return self.model.norm(hidden) if self.is_last else hidden

    def _whole_rows(self, hidden: torch.Tensor, packed: PackedRow | None) -> dict[str, dict[str, Any]]:
        """Return the inputs of layers besides states of whole rows, by attention kind."""
        longest = hidden.shape[1] if packed is None else max(segment.longest for segment in packed)
        rotation, masks = self._geometry(hidden, longest)
        if packed is None:
            return {kind: {"attention_mask": mask, "position_embeddings": rotation} for kind, mask in masks.items()}
        with torch.no_grad():
            rotations = tuple(repeated(part, packed) for part in rotation)
            rows = {k: RowAttention.for_row(packed, self._window(k), mask, hidden) for k, mask in masks.items()}
        return {
            kind: {"attention_mask": mask, "position_embeddings": rotations, PACKED: rows[kind]}
            for kind, mask in masks.items()
        }

    def _cut_rows(self, hidden: torch.Tensor, cut: ContextCut) -> dict[str, dict[str, Any]]:
        """Return the inputs of layers besides states of some positions, by attention kind."""
        with torch.no_grad():
            rotation = self._rotation(hidden, max(cut.lengths))
            own = tuple(part.index_select(1, cut.positions) for part in rotation)
            masks = ChunkMasks.by_kind(cut, self._windows(), self.config._attn_implementation, hidden)
        return {
            kind: {"attention_mask": None, "position_embeddings": own, CONTEXT: mask} for kind, mask in masks.items()
        }

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See PipelineStage."""
        weight = self.model.embed_tokens.weight if self.tied else self.lm_head.weight
        logits = nn.functional.linear(hidden, weight)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _rotation(self, hidden: torch.Tensor, length: int) -> Any:
        return self.rotary(hidden, torch.arange(length, device=hidden.device)[None, :])


def read_config(folder: Path, field: str, stages: int) -> Any:
    """Return the model's configuration. Raises WorkError ModelCorrupt if it does not load, and ModelUnsupported if it
    cannot be cut into `stages`."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise WorkError(
            "ModelCorrupt", f"{field}: {folder}: config.json does not load: {error}", field=field,
            exit_code=ExitCode.BAD_MODEL,
        ) from error  # fmt: skip
    if config.model_type not in FAMILIES:
        raise WorkError(
            "ModelUnsupported",
            f"{field}: {folder} is of model_type {config.model_type!r}; training cuts {', '.join(FAMILIES)}",
            field=field,
            exit_code=ExitCode.BAD_MODEL,
        )
    if not 1 <= stages <= config.num_hidden_layers:
        raise WorkError(
            "ModelUnsupported",
            f"spec.training.parallelism.pipeline: {stages} stages cannot be cut from the {config.num_hidden_layers} "
            f"layers of {folder}; give at most {config.num_hidden_layers}",
            field="spec.training.parallelism.pipeline",
            exit_code=ExitCode.BAD_MODEL,
        )
    return config


def attention_of(job: RLHFJob) -> Attention:
    """Return the attention implementation: explicit in a deterministic job, because its sums have one order."""
    whole: Attention = "eager" if job.spec.deterministic else "sdpa"
    if job.spec.training.parallelism.context > 1:
        return CUT[whole]
    return PACKED_ROWS[whole] if job.spec.training.packing else whole


def build_stage(
    config: Any,
    tensors: TensorFolder,
    stages: int,
    stage: int,
    head: Head,
    device: torch.device,
    attention: Attention,
    freeze: Callable[[ModelStage], None] | None = None,
    make: "Callable[[Any, range, int, Head], ModelStage] | None" = None,
) -> ModelStage:
    """Return one stage on `device`, read from `tensors`; trained parameters are float32.

    `freeze` marks untrained parameters of a stage without memory and sets their type; None: all are trained. Raises
    WorkError like `PipelineStage.fill`.
    """
    if getattr(config, "attn_logit_softcapping", None) is not None:
        attention = WRITTEN_OUT[attention]  # the fused kernel has no soft cap
    chosen: dict[str, Any] = {"attn_implementation": attention, "dtype": torch.float32}
    if config.model_type in NAMES:
        chosen["experts_implementation"] = WHOLE
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, **chosen)
    layers = stage_layers(config.num_hidden_layers, stages, stage)
    built = (make or ModelStage)(skeleton, layers, stages - 1 - stage, head)
    if freeze is not None:
        freeze(built)
    built.to_empty(device=device)
    for module in built.modules():
        if module._non_persistent_buffers_set:
            for parameter in module.parameters(recurse=False) if make else ():
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # random numbers would need all ranks
            skeleton._init_weights(module)  # rotations and scales that no file contains
    built.fill(as_parameters(tensors, config.model_type))
    built.eval()
    if freeze is None:
        built.requires_grad_()
    return built
