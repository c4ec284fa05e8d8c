"""One pipeline stage of a model as the rest of training uses it, for modules of any backend.

A stage's parameters have its own names and layouts; a folder has Hugging Face's. `in_folder` and `of_folder` convert
between the two, for weights and moments.

Rule: a round trip restores every bit. With tied embeddings the last stage holds the embedding a second time, as the
head. Only the first stage publishes and saves it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import torch
from torch import nn

from rlhf_workers.training.batches.packed_rows import PackedRow
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.parallel.context_group import ContextCut
from rlhf_workers.training.parallel.tensor_group import TensorGroup
from rlhf_workers.training.parallel.tensor_parts import TensorPart
from rlhf_workers.weights.expert_files import Tensors

EMBEDDING: Final = "model.embed_tokens.weight"
VALUE_HEAD: Final = "value_head.weight"
SCORE_HEAD: Final = "score.weight"
"""Head of a sequence classification model, and the initial head of a critic that starts from a reward model."""
HEADS_IN_FILES: Final[Mapping[str, str]] = {VALUE_HEAD: SCORE_HEAD}
"""Head -> its name in checkpoint files: a critic is saved as a sequence classification model."""
GEOMETRIES_KEPT: Final = 4
"""Maximum cached masks and rotations, one per sequence length; a float32 mask at length 8192 is 256 MiB."""

Head = Literal["lm", "value", "score"]
Attention = Literal["eager", "sdpa", "packed_eager", "packed_sdpa", "context_eager", "context_sdpa"]
"""Attention implementation by its name in transformers; `packed_attention` and `context_attention` define the later
ones."""
Reader = Callable[[str, torch.Size], torch.Tensor]
"""(Hugging Face name, shape) -> the tensor."""


class PipelineStage(nn.Module, ABC):
    """Layers `layer_numbers` of a model, with the parts of a first and a last stage."""

    rotary: Any
    """Hugging Face's rotary embedding of the model."""
    embedding = EMBEDDING
    """Name of this stage's embedding parameter, if it has one."""
    replicated: frozenset[str] = frozenset()
    """Parameters that all ranks of a tensor or expert group hold alike."""
    used_in_parts: frozenset[str] = frozenset()
    """Replicated parameters whose gradient on a rank covers only its own heads or positions."""
    keepers: Mapping[str, int]
    """For a stage in parts: name of a whole tensor -> number of the rank that keeps it for readers."""
    whole_tensors: dict[str, torch.Tensor]
    """Whole tensors that this rank keeps, float32, on the stage's device, as of the last gathering or loading."""
    saved_type: torch.dtype = torch.float32
    """Number type of the model's weights in checkpoints."""

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
        """Add a value or score head to a last stage, as the last of its parameters."""
        if self.is_last and self.head == "value":
            self.value_head = nn.Linear(self.config.hidden_size, 1, bias=False, device="meta")
        elif self.is_last and self.head == "score":
            self.score = nn.Linear(self.config.hidden_size, 1, bias=False, device="meta")

    @abstractmethod
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer, [b, `own_positions`, hidden], for token ids [b, L]."""

    def own_positions(self, length: int) -> int:
        """Return the number of positions on this rank between layers and stages, for rows of `length`."""
        return length

    @abstractmethod
    def forward(
        self, hidden: torch.Tensor, packed: PackedRow | None = None, cut: ContextCut | None = None
    ) -> torch.Tensor:
        """Return [b, L, hidden] for [b, L, hidden], where L is `own_positions`. The last stage's result is normed and
        covers all positions, or with `cut` this rank's; padding may follow. `packed`: b is 1, and the row consists of
        these segments. `cut`: the states are those of a rank's positions.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocabulary] for normed states [n, hidden]; last stage of a policy."""

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return values, float32 [n], for normed states [n, hidden]; last stage of a critic."""
        values: torch.Tensor = self.value_head(hidden).squeeze(-1).float()
        return values

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return scores, float32 [n], for normed states [n, hidden]; last stage of a reward model."""
        scores: torch.Tensor = self.score(hidden).squeeze(-1).float()
        return scores

    # ------------------------------------------------------------ parameters

    def join(self, communicator: Communicator) -> None:
        """Set the communicator of the ranks that hold this stage together, after they met and before any
        computation."""
        self.tensor.communicator = communicator

    def part_of(self, name: str, rank: int | None = None) -> TensorPart | None:
        """Return the part of a folder's tensor that `in_folder` gives on this rank of the tensor group, or on another;
        None: all of it."""
        return None

    @property
    def duplicates(self) -> frozenset[str]:
        """Parameters that are copies of another stage's."""
        return frozenset({self.embedding} if self.tied and self.is_last and not self.is_first else ())

    @property
    def sums_embedding(self) -> bool:
        """Whether this stage trains a tied embedding; if first and last stage differ, both sum its gradients."""
        return self.tied and any(part.requires_grad for name, part in self.named_parameters() if name == self.embedding)

    def in_folder(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, tensor) for a tensor with the layout of parameter `name`, as views if possible."""
        yield name, tensor

    def of_folder(self, name: str, read: Reader) -> torch.Tensor:
        """Return a tensor with the layout of parameter `name`, from tensors that `read` returns by Hugging Face's
        names."""
        return read(name, self.get_parameter(name).shape)

    def fill(self, tensors: Tensors) -> None:
        """Read all parameters from files of any type. Without a value head, use that of a reward model, or zeros.
        Raises WorkError ModelCorrupt if a tensor is missing or has the wrong shape.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name not in (VALUE_HEAD, SCORE_HEAD) or name in tensors:
                    self._take(name, parameter, self.of_folder(name, tensors.read))
                elif SCORE_HEAD in tensors:
                    self._take(name, parameter, tensors.read(SCORE_HEAD, parameter.shape))
                else:
                    self._take(name, parameter, torch.zeros(parameter.shape))

    def _take(self, name: str, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Copy the value of a whole parameter to this rank's storage of it."""
        parameter.copy_(value)

    # ------------------------------------------------------------ masks and rotations

    def forget_geometries(self) -> None:
        """Free the masks and rotations; they are recomputed on demand."""
        self._geometries.clear()

    @abstractmethod
    def _rotation(self, hidden: torch.Tensor, length: int) -> Any:
        """Return rotary embeddings of `length` positions in the form that the layers of `hidden` [b, L, hidden]
        take."""

    def _sliding(self) -> list[str]:
        """Return the attention kind of every layer."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            window = getattr(self.config, "sliding_window", None)
            return ["full_attention" if window is None else "sliding_attention"] * len(self.layer_numbers)
        return [kinds[number] for number in self.layer_numbers]

    def _geometry(self, hidden: torch.Tensor, length: int) -> tuple[Any, dict[str, torch.Tensor | None]]:
        """Return rotary embeddings and the mask of each attention kind, which are stored by length."""
        if length not in self._geometries:
            if len(self._geometries) >= GEOMETRIES_KEPT:
                self._geometries.clear()
            with torch.no_grad():
                rotation = self._rotation(hidden, length)
                masks = {kind: self._mask(kind, length, hidden) for kind in set(self._sliding())}
            self._geometries[length] = rotation, masks
        return self._geometries[length]

    def _mask(self, kind: str, length: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the mask; None if the fused kernel's own causal mask is enough."""
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
        """Return the most keys that a query of an attention kind sees, including its own; None: all up to its own."""
        window: int | None = self.config.sliding_window if kind == "sliding_attention" else None
        return window

    def _windows(self) -> dict[str, int | None]:
        """Return the window of each attention kind of this stage's layers."""
        return {kind: self._window(kind) for kind in set(self._sliding())}

    def _needs_mask(self, device: torch.device) -> bool:
        """Return whether the fused kernel needs a mask in place of its own causal one: on a GPU without autocast, for a
        model with fewer key heads than query heads.
        """
        heads, keys = self.config.num_attention_heads, self.config.num_key_value_heads
        return device.type == "cuda" and heads != keys and not torch.is_autocast_enabled(device.type)
