"""Memory that one pipeline stage needs while it trains, in bytes by what it is for, from shapes alone.

Counted as the code of this version allocates: float32 master weights, gradients and moments; what each layer keeps of a
micro-batch for its backward, tensor by tensor; logits, in float32 or as matrix products make them, and their gradient;
weights cast to half precision once a mini-batch; what the backward of the loss, or of one layer, needs for a moment.
Not counted: the CUDA context and libraries (RUNTIME_BYTES, which PyTorch's own counters leave out, too), and what the
allocator cannot use because it is in pieces (FRAGMENTED_SHARE of what it holds).

Rule: arithmetic; a test counts what the trainer itself keeps, family by family, and holds this module to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

RUNTIME_BYTES: Final = 700 * 2**20
"""CUDA context, cuBLAS and kernels of a process, beside what PyTorch allocates; by reading, not yet measured."""
FRAGMENTED_SHARE: Final = 0.1
"""Of what PyTorch allocates: what it holds beyond that, in pieces too small; by reading, not yet measured."""
WORKSPACE_BYTES: Final = 32 * 2**20
"""Of cuBLAS, which PyTorch allocates like a tensor."""
CHUNK_BYTES: Final = 64 * 2**20
"""Float32 rows of logits that the loss works on at a time (`CHUNK_BYTES` of its module)."""
CHUNKS: Final = 6
"""Of them the backward of the loss holds so many at once."""
OPTIMIZER_BYTES: Final = 16
"""Float32 weight, gradient and two moments, a parameter."""
NORM_CHUNK_BYTES: Final = 16 * 2**20 * 8
"""Gradients in float64 while their norm is taken."""
HEADS_NORMED: Final = ("qwen3",)
"""Families that norm queries and keys."""
FOUR_NORMS: Final = ("gemma2",)
"""Families with a norm before and after each block, and soft caps, which only written-out attention has."""


@dataclass(frozen=True)
class TransformerShape:
    """Of a model like Llama."""

    family: str
    """`model_type` of its config."""
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_width: int
    intermediate: int
    vocabulary: int
    tied: bool
    window: int | None = None
    """Tokens that a sliding layer sees; None: there is none."""

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Width of all key heads."""
        return self.key_value_heads * self.head_width

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of one layer; norms and biases are left out, less than a thousandth."""
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.intermediate)


@dataclass(frozen=True)
class StageTraining:
    """One stage and how it trains."""

    shape: TransformerShape
    stages: int
    stage: int
    head: Literal["lm", "value"]
    samples: int
    """Of a micro-batch."""
    tokens: int
    """Of each sample, padding included."""
    response_tokens: int
    """Trained tokens of each sample."""
    in_flight: int = 1
    """Micro-batches that wait for their backward."""
    half: bool = False
    """Matrix products in bfloat16."""
    recompute: bool = False
    """Activation checkpointing."""
    written_out: bool = False
    """Attention without a fused kernel, as deterministic jobs have it."""
    on_gpu: bool = True
    """GPUs have no fused kernel for float32 and fewer key heads than query heads: keys are repeated."""

    @property
    def layers(self) -> int:
        """Layers of this stage: consecutive, near-equal; the first stages take the remainder."""
        base, more = divmod(self.shape.layers, self.stages)
        return base + (self.stage < more)

    @property
    def last(self) -> bool:
        """The head is on this stage."""
        return self.stage == self.stages - 1

    @property
    def width(self) -> int:
        """Bytes of a result of a matrix product."""
        return 2 if self.half else 4

    @property
    def embedding_parameters(self) -> int:
        """Parameters of embedding and head on this stage."""
        table = self.shape.vocabulary * self.shape.hidden
        first, heads = self.stage == 0, self.last and self.head == "lm"
        if heads and first and self.shape.tied:
            return table
        return table * (first + heads) + (self.shape.hidden if self.last and self.head == "value" else 0)

    @property
    def parameters(self) -> int:
        """Parameters of this stage."""
        return self.layers * self.shape.layer_parameters + self.embedding_parameters


def shape_of(config: Mapping[str, Any]) -> TransformerShape:
    """Return the shape that a config.json tells. KeyError, TypeError or ValueError when it tells none."""
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    window = config.get("sliding_window")
    if not config.get("use_sliding_window", True):
        window = None
    return TransformerShape(
        family=str(config["model_type"]),
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        key_value_heads=int(config.get("num_key_value_heads") or heads),
        head_width=int(config.get("head_dim") or hidden // heads),
        intermediate=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        window=int(window) if window is not None else None,
    )


def training_memory(stage: StageTraining) -> dict[str, int]:
    """Return the bytes of a stage by what they are for, at the moment when it holds most."""
    parts = {"weights, gradients, moments": OPTIMIZER_BYTES * stage.parameters, "workspace": WORKSPACE_BYTES}
    if stage.half:
        head = stage.shape.vocabulary * stage.shape.hidden if stage.last and stage.head == "lm" else 0
        parts["half-precision weights"] = 2 * (stage.layers * stage.shape.layer_parameters + head)
    parts["activations"] = stage.in_flight * kept_by_layers(stage)
    parts["logits"] = kept_by_head(stage)
    parts["working memory"] = max(_loss_moment(stage), _layer_moment(stage), NORM_CHUNK_BYTES - sum(
        parts[name] for name in ("activations", "logits")
    ))  # fmt: skip
    return parts


def kept_by_layers(stage: StageTraining) -> int:
    """Return the bytes that the layers of a stage keep of one micro-batch."""
    tokens = stage.samples * stage.tokens
    if stage.recompute:
        return stage.layers * tokens * 4 * stage.shape.hidden
    return stage.layers * tokens * _kept_by_layer(stage)


def kept_by_head(stage: StageTraining) -> int:
    """Return the bytes that the last stage keeps of one micro-batch: norm, chosen states, logits."""
    if not stage.last:
        return 0
    shape, tokens, chosen = stage.shape, stage.samples * stage.tokens, stage.samples * stage.response_tokens
    kept = tokens * _norm(shape) + chosen * (stage.width * shape.hidden + 8)
    if stage.head == "lm":
        capped = 2 if shape.family in FOUR_NORMS else 1
        kept += chosen * (capped * stage.width * shape.vocabulary + 8 + 8)
    return kept


def _norm(shape: TransformerShape) -> int:
    """Input and normed input in float32, and one number, a token."""
    return 4 * (2 * shape.hidden + 1)


def _kept_by_layer(stage: StageTraining) -> int:
    """Bytes a token that one layer keeps."""
    shape, width = stage.shape, stage.width
    norms = 4 if shape.family in FOUR_NORMS else 2
    # Autocast casts the input of every product anew: three of attention, two of the MLP.
    inputs = 2 * 5 * shape.hidden if stage.half else 4 * 2 * shape.hidden
    blocks = width * 4 * shape.intermediate
    return norms * _norm(shape) + inputs + _kept_by_heads(stage) + _kept_by_attention(stage) + blocks


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
    """The gradient of the logits, and either parts of them in float32 or the gradient of the head's weights."""
    if not stage.last or stage.head != "lm":
        return 0
    chosen, shape = stage.samples * stage.response_tokens, stage.shape
    chunk = min(CHUNK_BYTES, 4 * chosen * shape.vocabulary)
    head = (4 + (2 if stage.half else 0)) * shape.vocabulary * shape.hidden
    return stage.width * chosen * shape.vocabulary + max(CHUNKS * chunk, head)


def _layer_moment(stage: StageTraining) -> int:
    """What the backward of one layer holds at once: three gradients of the MLP's width or of the scores; what is
    computed again."""
    tokens = stage.samples * stage.tokens
    again = tokens * _kept_by_layer(stage) if stage.recompute else 0
    wide = max(3 * stage.width * stage.shape.intermediate, 12 * stage.shape.hidden)
    if stage.written_out or stage.shape.family in FOUR_NORMS:
        wide = max(wide, 12 * stage.shape.heads * stage.tokens)
    return again + tokens * wide
