"""What the rest of training asks of one pipeline stage of a model, whatever backend its modules come from.

Owns the parts that every backend's stage has in common: its place in the pipeline, the heads that no language model
has, which parameter is a copy of another stage's, masks and rotations by length, and how a stage is filled from files.

A stage has parameters of its own names and layouts; a folder and the weights that are published have Hugging Face's.
`in_folder` and `of_folder` are the only way between the two, for weights and for an optimizer's moments alike, so that
a checkpoint of one backend is a checkpoint of every other. Rule: a round trip gives every bit back. What files alone
call otherwise, experts one by one, is `expert_files`'.

Tied embeddings: the last stage then holds the embedding a second time, as the head. Both copies start equal, their
gradients are summed before every step (`trainer`), so they stay equal bit by bit; only the first stage publishes and
saves it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import torch
from torch import nn

from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.parallel.context_group import ContextCut
from rlhf_workers.training.parallel.tensor_group import TensorGroup
from rlhf_workers.training.parallel.tensor_parts import TensorPart
from rlhf_workers.weights.expert_files import Tensors

EMBEDDING: Final = "model.embed_tokens.weight"
VALUE_HEAD: Final = "value_head.weight"
SCORE_HEAD: Final = "score.weight"
"""Head of a sequence classification model: a critic that starts from a reward model begins with it."""
HEADS_IN_FILES: Final[Mapping[str, str]] = {VALUE_HEAD: SCORE_HEAD}
"""Head -> its name in the files of a checkpoint: a critic is saved as a sequence classification model."""
GEOMETRIES_KEPT: Final = 4
"""Masks and rotations kept, one a sequence length; a mask at length 8192 is 256 MiB."""

Head = Literal["lm", "value", "score"]
Attention = Literal["eager", "sdpa", "packed_eager", "packed_sdpa", "context_eager", "context_sdpa"]
"""How attention is computed; names that transformers knows, the later ones by `packed_attention` and
`context_attention`."""
Reader = Callable[[str, torch.Size], torch.Tensor]
"""(Hugging Face name, shape) -> the tensor."""


class PipelineStage(nn.Module, ABC):
    """Layers `layer_numbers` of a model, with the parts of a first and a last stage."""

    rotary: Any
    """Hugging Face's rotary embedding of the model."""
    embedding = EMBEDDING
    """Name of this stage's parameter that holds the embedding, where it has it."""
    replicated: frozenset[str] = frozenset()
    """Parameters that every rank of a tensor group holds alike."""
    used_in_parts: frozenset[str] = frozenset()
    """Those of them whose gradient on a rank is that of its own heads alone."""
    keepers: Mapping[str, int]
    """Of a stage in parts: name of a whole tensor -> number of the rank that keeps it for those who ask."""
    kept: dict[str, torch.Tensor]
    """Whole tensors that this rank keeps, float32, on the stage's device: as of the last gathering, or as loaded."""
    saved_type: torch.dtype = torch.float32
    """Type in which the model's folder in a checkpoint has its weights."""

    def __init__(
        self, config: Any, layers: range, stages_after: int, head: Head, tensor: TensorGroup | None = None
    ) -> None:
        super().__init__()
        self.tensor = tensor or TensorGroup()
        """The ranks that hold this stage together."""
        self.config = config
        self.is_first, self.is_last = layers.start == 0, stages_after == 0
        self.layer_numbers = layers
        self.recompute = False
        self.head: Head = head
        self.tied = head == "lm" and bool(config.tie_word_embeddings)
        self._geometries: dict[int, tuple[Any, dict[str, torch.Tensor | None]]] = {}

    def _put_on_head(self) -> None:
        """Add the head that no language model has: the last of the parameters, whose order sums keep."""
        if self.is_last and self.head == "value":
            self.value_head = nn.Linear(self.config.hidden_size, 1, bias=False, device="meta")
        elif self.is_last and self.head == "score":
            self.score = nn.Linear(self.config.hidden_size, 1, bias=False, device="meta")

    @abstractmethod
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer [b, L, hidden] of token ids [b, L]."""

    def own_positions(self, length: int) -> int:
        """Return how many positions of rows of `length` are on this rank between layers and stages."""
        return length

    @abstractmethod
    def forward(
        self, hidden: torch.Tensor, packed: tuple[int, ...] | None = None, cut: ContextCut | None = None
    ) -> torch.Tensor:
        """Return [b, L, hidden] of [b, L, hidden], where L is `own_positions`; the last stage's result is normed, and
        of all positions, with padding behind them. `packed`: b is 1, and the row is of samples with so many tokens, of
        which none sees another. `cut`: the states are those of a rank's positions in rows that are cut so."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocabulary] of normed states [n, hidden]; last stage of a policy."""

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return values, float32 [n], of normed states [n, hidden]; last stage of a critic."""
        values: torch.Tensor = self.value_head(hidden).squeeze(-1).float()
        return values

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return scores, float32 [n], of normed states [n, hidden]; last stage of a reward model."""
        scores: torch.Tensor = self.score(hidden).squeeze(-1).float()
        return scores

    # ------------------------------------------------------------ parameters

    def join(self, communicator: Communicator) -> None:
        """Take the way to the ranks that hold this stage together: once they have met, before anything is computed."""
        self.tensor.communicator = communicator

    def part_of(self, name: str, rank: int | None = None) -> TensorPart | None:
        """Return which part of a folder's tensor `in_folder` gives on this rank of the tensor group, or on another;
        None: all of it."""
        return None

    @property
    def duplicates(self) -> frozenset[str]:
        """Parameters that another stage owns and this one holds a copy of."""
        return frozenset({self.embedding} if self.tied and self.is_last and not self.is_first else ())

    @property
    def sums_embedding(self) -> bool:
        """Whether another stage trains the same embedding, so that both add up their gradients."""
        return self.tied and any(part.requires_grad for name, part in self.named_parameters() if name == self.embedding)

    def in_folder(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, tensor) of a tensor laid out as parameter `name`: views of it where that can be."""
        yield name, tensor

    def of_folder(self, name: str, read: Reader) -> torch.Tensor:
        """Return a tensor laid out as parameter `name`, of those that `read` has by Hugging Face's names."""
        return read(name, self.get_parameter(name).shape)

    def fill(self, tensors: Tensors) -> None:
        """Read all parameters, whatever type the files have. A folder without a value head gives that of a reward
        model, or one of zeros. WorkError ModelCorrupt when a tensor is missing or misshapen."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name not in (VALUE_HEAD, SCORE_HEAD) or name in tensors:
                    self._take(name, parameter, self.of_folder(name, tensors.read))
                elif SCORE_HEAD in tensors:
                    self._take(name, parameter, tensors.read(SCORE_HEAD, parameter.shape))
                else:
                    self._take(name, parameter, torch.zeros(parameter.shape))

    def _take(self, name: str, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Put the value of a whole parameter where this rank holds it."""
        parameter.copy_(value)

    # ------------------------------------------------------------ masks and rotations

    def forget_geometries(self) -> None:
        """Free the masks and rotations; they are made again when they are needed."""
        self._geometries.clear()

    @abstractmethod
    def _rotation(self, hidden: torch.Tensor, length: int) -> Any:
        """Return rotary embeddings of so many positions as the layers of `hidden` [b, L, hidden] take them."""

    def _sliding(self) -> list[str]:
        """Return the kind of attention of every layer."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            window = getattr(self.config, "sliding_window", None)
            return ["full_attention" if window is None else "sliding_attention"] * len(self.layer_numbers)
        return [kinds[number] for number in self.layer_numbers]

    def _geometry(self, hidden: torch.Tensor, length: int) -> tuple[Any, dict[str, torch.Tensor | None]]:
        """Return rotary embeddings and the mask of each attention kind for this length, on which alone they depend."""
        if length not in self._geometries:
            if len(self._geometries) >= GEOMETRIES_KEPT:
                self._geometries.clear()
            with torch.no_grad():
                rotation = self._rotation(hidden, length)
                masks = {kind: self._mask(kind, length, hidden) for kind in set(self._sliding())}
            self._geometries[length] = rotation, masks
        return self._geometries[length]

    def _mask(self, kind: str, length: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the mask; None where the fused kernel's own causal mask is enough."""
        window = self._window(kind) or length
        eager = self.config._attn_implementation.endswith("eager")
        if not eager and window >= length and not self._needs_mask(hidden.device):
            return None
        position = torch.arange(length, device=hidden.device)
        distance = position[:, None] - position[None, :]
        seen = (distance >= 0) & (distance < window)
        if not eager:
            return seen[None, None]
        return torch.zeros(length, length, device=hidden.device, dtype=hidden.dtype).masked_fill_(
            ~seen, torch.finfo(hidden.dtype).min
        )[None, None]

    def _window(self, kind: str) -> int | None:
        """Return how many keys a query of an attention kind sees, itself among them; None: all before it."""
        window: int | None = self.config.sliding_window if kind == "sliding_attention" else None
        return window

    def _windows(self) -> dict[str, int | None]:
        """Return the window of each attention kind of this stage's layers."""
        return {kind: self._window(kind) for kind in set(self._sliding())}

    def _needs_mask(self, device: torch.device) -> bool:
        """On a GPU no kernel takes float32 and fewer key heads than query heads: attention would be written out, with
        all its scores. With a mask transformers repeats the keys, and there is a kernel for that."""
        heads, keys = self.config.num_attention_heads, self.config.num_key_value_heads
        return device.type == "cuda" and heads != keys and not torch.is_autocast_enabled(device.type)


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """Return the layers of a stage: consecutive, near-equal; the first take the remainder, the last has the head."""
    base, more = divmod(layers, stages)
    start = stage * base + min(stage, more)
    return range(start, start + base + (stage < more))
