"""Memory that one pipeline stage needs while it trains, in bytes by purpose, computed from shapes.

Not counted: RUNTIME_BYTES of the CUDA context and libraries, and FRAGMENTED_SHARE of the allocator's memory.
"""

from dataclasses import dataclass
from typing import Final, Literal

from rlhf_planner.transformer_shape import Experts, TransformerShape, stage_layers

RUNTIME_BYTES: Final = 700 * 2**20
"""Bytes of CUDA context, cuBLAS and kernels of a process, besides PyTorch's allocations; from reading, not measured."""
FRAGMENTED_SHARE: Final = 0.1
"""Share of PyTorch's memory that fragmentation adds to its allocations; from reading, not measured."""
WORKSPACE_BYTES: Final = 32 * 2**20
"""Bytes of cuBLAS's workspace, which PyTorch allocates like a tensor."""
CHUNK_BYTES: Final = 64 * 2**20
"""Bytes of float32 rows of logits that the loss processes at a time (`CHUNK_BYTES` of its module)."""
CHUNKS: Final = 6
"""Number of such chunks that the backward of the loss has in memory at once."""
OPTIMIZER_BYTES: Final = 16
"""Bytes per parameter: float32 weight, gradient and two moments."""
NORM_CHUNK_BYTES: Final = 16 * 2**20 * 8
"""Bytes of gradients in float64 while their norm is computed."""
CHOICE_BYTES: Final = 44
"""Bytes for each expert that a token chose: its position among the others', in both directions, and its weight."""
HEADS_NORMED: Final = ("qwen3", "qwen3_moe")
"""Families that norm queries and keys."""
FOUR_NORMS: Final = ("gemma2",)
"""Families with a norm before and after each block, and with soft caps, for which attention is written out."""


@dataclass(frozen=True)
class StageTraining:
    """One stage and how it trains."""

    shape: TransformerShape
    stages: int
    stage: int
    head: Literal["lm", "value"]
    samples: int
    """Samples of a micro-batch."""
    tokens: int
    """Tokens of each sample, padding included."""
    response_tokens: int
    """Trained tokens of each sample."""
    in_flight: int = 1
    """Micro-batches that wait for their backward."""
    half: bool = False
    """Whether matrix products are in bfloat16."""
    recompute: bool = False
    """Whether activation checkpointing is on."""
    written_out: bool = False
    """Whether attention has no fused kernel, as in deterministic jobs."""
    on_gpu: bool = True
    """Whether the stage is on a GPU, where float32 with fewer key heads than query heads has no fused kernel: keys are
    repeated.
    """

    @property
    def layers(self) -> int:
        """Return the number of layers of this stage."""
        return len(self._own_layers)

    @property
    def routed_layers(self) -> int:
        """Return the number of its layers that route tokens to experts."""
        if self.shape.experts is None:
            return 0
        return len(set(self._own_layers) - self.shape.experts.dense)

    @property
    def _own_layers(self) -> range:
        return stage_layers(self.shape.layers, self.stages, self.stage)

    @property
    def layers_parameters(self) -> int:
        """Return the parameters of the matrices of its layers."""
        dense = (self.layers - self.routed_layers) * self.shape.layer_parameters(False)
        return dense + self.routed_layers * self.shape.layer_parameters(True)

    @property
    def last(self) -> bool:
        """Return whether the head is on this stage."""
        return self.stage == self.stages - 1

    @property
    def width(self) -> int:
        """Return the bytes of one number in the result of a matrix product."""
        return 2 if self.half else 4

    @property
    def embedding_parameters(self) -> int:
        """Return the parameters of embedding and head on this stage."""
        table = self.shape.vocabulary * self.shape.hidden
        first, heads = self.stage == 0, self.last and self.head == "lm"
        if heads and first and self.shape.tied:
            return table
        return table * (first + heads) + (self.shape.hidden if self.last and self.head == "value" else 0)

    @property
    def parameters(self) -> int:
        """Return the parameters of this stage, without norms and biases."""
        return self.layers_parameters + self.embedding_parameters


def training_memory(stage: StageTraining) -> dict[str, int]:
    """Return the bytes of a stage by purpose, at its peak."""
    parts = {"weights, gradients, moments": OPTIMIZER_BYTES * stage.parameters, "workspace": WORKSPACE_BYTES}
    if stage.half:
        head = stage.shape.vocabulary * stage.shape.hidden if stage.last and stage.head == "lm" else 0
        parts["half-precision weights"] = 2 * (stage.layers_parameters + head) - stage.routed_layers * _cast_experts(
            stage
        )
    parts["activations"] = stage.in_flight * kept_by_layers(stage)
    parts["logits"] = kept_by_head(stage)
    parts["working memory"] = max(_loss_moment(stage), _layer_moment(stage), NORM_CHUNK_BYTES - sum(
        parts[name] for name in ("activations", "logits")
    ))  # fmt: skip
    return parts


def kept_by_layers(stage: StageTraining) -> int:
    """Return the bytes that the layers of a stage save of one micro-batch."""
    tokens = stage.samples * stage.tokens
    if stage.recompute:
        return stage.layers * tokens * 4 * stage.shape.hidden
    dense = (stage.layers - stage.routed_layers) * tokens * _kept_by_layer(stage, routed=False)
    return dense + stage.routed_layers * (tokens * _kept_by_layer(stage, routed=True) + _cast_experts(stage))


def kept_by_head(stage: StageTraining) -> int:
    """Return the bytes that the last stage saves of one micro-batch: norm, chosen states, logits."""
    if not stage.last:
        return 0
    shape, tokens, chosen = stage.shape, stage.samples * stage.tokens, stage.samples * stage.response_tokens
    saved = tokens * _norm(shape) + chosen * (stage.width * shape.hidden + 8)
    if stage.head == "lm":
        capped = 2 if shape.family in FOUR_NORMS else 1
        saved += chosen * (capped * stage.width * shape.vocabulary + 8 + 8)
    return saved


def _norm(shape: TransformerShape) -> int:
    """Return the bytes per token of a norm: input and normed input in float32, and one number."""
    return 4 * (2 * shape.hidden + 1)


def _kept_by_layer(stage: StageTraining, routed: bool) -> int:
    """Return the bytes per token that one layer saves; `routed`: whether its tokens go to experts."""
    shape, width = stage.shape, stage.width
    norms = 4 if shape.family in FOUR_NORMS else 2
    # Autocast casts the input of every product again: three of attention, two of the MLP.
    inputs = 2 * 5 * shape.hidden if stage.half else 4 * 2 * shape.hidden
    blocks = _kept_by_experts(stage, shape.experts) if routed and shape.experts else width * 4 * shape.intermediate
    return norms * _norm(shape) + inputs + _kept_by_heads(stage) + _kept_by_attention(stage) + blocks


def _kept_by_experts(stage: StageTraining, experts: Experts) -> int:
    """Return the bytes of a token's copy and results for each chosen expert, and of the router's choice."""
    each = stage.width * (2 * stage.shape.hidden + 4 * experts.width) + CHOICE_BYTES
    return experts.chosen * each + 4 * experts.count


def _cast_experts(stage: StageTraining) -> int:
    """Return the bytes of experts that each micro-batch casts again: slices of a tensor do not share their casts."""
    if stage.shape.experts is None or not stage.half:
        return 0
    return 2 * stage.shape.experts.parameters(stage.shape.hidden)


def _kept_by_heads(stage: StageTraining) -> int:
    if stage.shape.family not in HEADS_NORMED:
        return 0
    normed = stage.shape.queries + stage.shape.keys
    return (4 + stage.width) * normed + 4 * (stage.shape.heads + stage.shape.key_value_heads)


def _kept_by_attention(stage: StageTraining) -> int:
    shape, width = stage.shape, stage.width
    if stage.written_out or shape.family in FOUR_NORMS:
        scores = 4 + (2 if stage.half else 0) + (width if shape.family in FOUR_NORMS else 0)
        return 4 * width * shape.queries + scores * shape.heads * stage.tokens
    masked = (shape.window is not None and shape.window < stage.tokens) or (stage.on_gpu and not stage.half)
    keys = shape.queries if masked else shape.keys  # with a mask they are repeated for each head
    return width * (2 * shape.queries + 2 * keys) + 4 * shape.heads


def _loss_moment(stage: StageTraining) -> int:
    """Return the bytes of the logits' gradient, with either float32 chunks of them or the gradient of the head's
    weights.
    """
    if not stage.last or stage.head != "lm":
        return 0
    chosen, shape = stage.samples * stage.response_tokens, stage.shape
    chunk = min(CHUNK_BYTES, 4 * chosen * shape.vocabulary)
    head = (4 + (2 if stage.half else 0)) * shape.vocabulary * shape.hidden
    return stage.width * chosen * shape.vocabulary + max(CHUNKS * chunk, head)


def _layer_moment(stage: StageTraining) -> int:
    """Return the peak bytes of one layer's backward: gradients of its widest tensor, and recomputed tensors."""
    tokens = stage.samples * stage.tokens
    routed = stage.routed_layers > 0
    again = tokens * _kept_by_layer(stage, routed) + (_cast_experts(stage) if routed else 0) if stage.recompute else 0
    experts = stage.shape.experts
    inner = experts.chosen * experts.width if routed and experts is not None else stage.shape.intermediate
    wide = max(3 * stage.width * inner, 12 * stage.shape.hidden)
    if stage.written_out or stage.shape.family in FOUR_NORMS:
        wide = max(wide, 12 * stage.shape.heads * stage.tokens)
    return again + tokens * wide
