"""Cutting a Hugging Face causal language model into pipeline stages that keep its parameter names.

A stage holds its own layers; the first also the embedding, the last the final norm and its head: the language
model's, or a value head for a critic. It is built without ever allocating the rest of the model, and reads its own
tensors only.

Tied embeddings: the last stage then holds the embedding a second time, under its own name, as the head. Both copies
start equal, their gradients are summed before every step (`trainer`), so they stay equal bit by bit; only the first
stage publishes and saves it.

Rule: batches are padded on the right, so a causal mask alone keeps padding out of every real position. Modules stay
in eval mode: dropout would make the trained policy another one than that which sampled. Only families whose whole
forward is embedding, layers, norm and head are taken; others would train silently wrong.
"""

from pathlib import Path
from typing import Any, Final, Literal

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhf_api.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.training.tensor_file import TensorFolder

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma2")
"""`model_type`s whose stages are tested to equal the whole model."""

EMBEDDING: Final = "model.embed_tokens.weight"
VALUE_HEAD: Final = "value_head.weight"
SCORE_HEAD: Final = "score.weight"
"""Head of a sequence classification model: a critic that starts from a reward model begins with it."""
GEOMETRIES_KEPT: Final = 4
"""Masks and rotations kept, one a sequence length; a mask at length 8192 is 256 MiB."""

Head = Literal["lm", "value"]
Attention = Literal["eager", "sdpa"]


class ModelStage(nn.Module):
    """Layers `layers` of a model, with the parts of a first and a last stage; parameter names are Hugging Face's."""

    def __init__(self, skeleton: Any, layers: range, stages_after: int, head: Head) -> None:
        """Takes the modules it needs from `skeleton` (on the meta device); they hold no memory yet."""
        super().__init__()
        self.config = skeleton.config
        self.is_first, self.is_last = layers.start == 0, stages_after == 0
        self.layer_numbers = layers
        self.recompute = False
        self.head: Head = head
        self.tied = head == "lm" and bool(self.config.tie_word_embeddings)
        self.model: Any = nn.Module()
        if self.is_first or (self.is_last and self.tied):
            self.model.embed_tokens = skeleton.model.embed_tokens
        self.model.layers = nn.ModuleDict({str(number): skeleton.model.layers[number] for number in layers})
        self.rotary: Any = skeleton.model.rotary_emb
        if self.is_last:
            self.model.norm = skeleton.model.norm
            if head == "value":
                self.value_head = nn.Linear(self.config.hidden_size, 1, bias=False, device="meta")
            elif not self.tied:
                self.lm_head: Any = skeleton.lm_head
        self._geometries: dict[int, tuple[Any, dict[str, torch.Tensor | None]]] = {}

    @property
    def duplicates(self) -> frozenset[str]:
        """Parameters that another stage owns and this one holds a copy of."""
        return frozenset({EMBEDDING} if self.tied and self.is_last and not self.is_first else ())

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer [b, L, hidden] of token ids [b, L]."""
        embedded: torch.Tensor = self.model.embed_tokens(tokens)
        return embedded

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [b, L, hidden] of [b, L, hidden]; the last stage's result is normed."""
        rotation, masks = self._geometry(hidden)
        for layer, sliding in zip(self.model.layers.values(), self._sliding(), strict=True):
            arguments = {"attention_mask": masks[sliding], "position_embeddings": rotation}
            if self.recompute:
                hidden = checkpoint(layer, hidden, use_reentrant=False, **arguments)
            else:
                hidden = layer(hidden, **arguments)
        return self.model.norm(hidden) if self.is_last else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocabulary] of normed states [n, hidden]; last stage of a policy."""
        weight = self.model.embed_tokens.weight if self.tied else self.lm_head.weight
        logits = nn.functional.linear(hidden, weight)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return values, float32 [n], of normed states [n, hidden]; last stage of a critic."""
        values: torch.Tensor = self.value_head(hidden).squeeze(-1).float()
        return values

    def _sliding(self) -> list[str]:
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            window = getattr(self.config, "sliding_window", None)
            return ["full_attention" if window is None else "sliding_attention"] * len(self.layer_numbers)
        return [kinds[number] for number in self.layer_numbers]

    def _geometry(self, hidden: torch.Tensor) -> tuple[Any, dict[str, torch.Tensor | None]]:
        """Return rotary embeddings and the mask of each attention kind for this length, on which alone they depend."""
        length = hidden.shape[1]
        if length not in self._geometries:
            if len(self._geometries) >= GEOMETRIES_KEPT:
                self._geometries.clear()
            with torch.no_grad():
                rotation = self.rotary(hidden, torch.arange(length, device=hidden.device)[None, :])
                masks = {kind: self._mask(kind, length, hidden) for kind in set(self._sliding())}
            self._geometries[length] = rotation, masks
        return self._geometries[length]

    def _mask(self, kind: str, length: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the mask; None where the fused kernel's own causal mask is enough."""
        window = self.config.sliding_window if kind == "sliding_attention" else length
        eager = self.config._attn_implementation == "eager"
        if not eager and window >= length:
            return None
        position = torch.arange(length, device=hidden.device)
        distance = position[:, None] - position[None, :]
        seen = (distance >= 0) & (distance < window)
        if not eager:
            return seen[None, None]
        return torch.zeros(length, length, device=hidden.device, dtype=hidden.dtype).masked_fill_(
            ~seen, torch.finfo(hidden.dtype).min
        )[None, None]


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """Return the layers of a stage: consecutive, near-equal; the first take the remainder, the last has the head."""
    base, more = divmod(layers, stages)
    start = stage * base + min(stage, more)
    return range(start, start + base + (stage < more))


def read_config(folder: Path, field: str, stages: int) -> Any:
    """Return the model's configuration, after checking that it can be cut into `stages`."""
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


def build_stage(
    config: Any, tensors: TensorFolder, stages: int, stage: int, head: Head, device: torch.device, attention: Attention
) -> ModelStage:
    """Return one stage on `device` with float32 master weights, read from `tensors` (whatever type the file has).

    A folder without a value head gives that of a reward model, or one of zeros. WorkError ModelCorrupt when a tensor
    is missing or misshapen.
    """
    if getattr(config, "attn_logit_softcapping", None) is not None:
        attention = "eager"  # the fused kernel has no soft cap
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
    layers = stage_layers(config.num_hidden_layers, stages, stage)
    built = ModelStage(skeleton, layers, stages - 1 - stage, head)
    built.to_empty(device=device)
    for module in built.modules():
        if module._non_persistent_buffers_set:
            skeleton._init_weights(module)  # rotations and scales that no file holds
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name != VALUE_HEAD or name in tensors:
                parameter.copy_(tensors.read(name, parameter.shape))
            elif SCORE_HEAD in tensors:
                parameter.copy_(tensors.read(SCORE_HEAD, parameter.shape))
            else:
                parameter.zero_()
    built.eval().requires_grad_()
    return built
