"""What a generation engine is: the seam between the generation role and whatever decodes (torch here, vLLM elsewhere).

Rule: plain data in and out, no messages of the wire. An engine is driven by one thread; `step` is one bounded piece of
work. A sample's tokens depend on its prompt, its random key, the weights and the sampling parameters: never on what
else is decoded, where, or in how many pieces. An engine must never lose a sample: until it is in `StepReport.finished`,
`withdraw` returns it with every token.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

TokenArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
FinishReason = Literal["", "stop", "length"]


class SampleKey(NamedTuple):
    """Name of a sample in the coordinator's ledger; each lease of the sample has a higher `attempt`."""

    iteration: int
    sample: int
    attempt: int


class VersionRun(NamedTuple):
    """So many consecutive response tokens were sampled with this weight version."""

    version: int
    tokens: int


@dataclass(frozen=True)
class SamplingParameters:
    """How a token is drawn from the logits."""

    temperature: float = 1.0
    """0 is greedy; log-probabilities are then those at temperature 1."""
    top_p: float = 1.0
    """Smallest set of most probable tokens with this much probability; 1 keeps all."""
    top_k: int = 0
    """So many most probable tokens; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; kept in it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside the tokenizer's end-of-sequence token; kept in it."""


@dataclass(frozen=True)
class Request:
    """A sample to decode, from its start or from the tokens it already has."""

    key: SampleKey
    prompt: TokenArray
    """[p], p >= 1."""
    random_key: int
    """64 bits; with the response position, the only source of randomness."""
    max_response_tokens: int
    """Response tokens in total, those in `tokens` included."""
    tokens: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    """[k] response tokens already decoded."""
    log_probabilities: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """[k]."""
    versions: tuple[VersionRun, ...] = ()
    """Runs that sum to k."""


@dataclass(frozen=True)
class Response:
    """Response tokens of a sample from `offset` on."""

    key: SampleKey
    offset: int
    tokens: TokenArray
    """[n]."""
    log_probabilities: FloatArray
    """[n], natural log, under softmax(logits / temperature) before top-p and top-k."""
    versions: tuple[VersionRun, ...]
    """Runs that sum to n."""
    finish_reason: FinishReason = ""
    """Empty while unfinished."""


class Prefill(NamedTuple):
    """One pass over samples that begin, or go on, here."""

    samples: int
    tokens: int
    """Of all of them together."""
    resumed: bool
    """All were samples with a response, whose tokens went through it too."""


@dataclass
class StepReport:
    """What one step did."""

    finished: list[Response] = field(default_factory=list)
    """Whole responses."""
    decoded: int = 0
    """Tokens sampled."""
    prefilled: int = 0
    """Prompt tokens (and replayed response tokens) run through the model."""
    prefill_ns: int = 0
    """Time of it that prefill took."""
    prefills: list[Prefill] = field(default_factory=list)
    """What that time was spent on."""
    replayed: int = 0
    """Rows of decode passes that decoded a known token again."""
    rows: int = 0
    """Samples that went through a decode pass."""
    keys: int = 0
    """Keys that were read, of all rows together."""


class KvShape(NamedTuple):
    """What one token leaves in one layer's cache."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> "KvShape":
        """Of [.., heads, tokens, size] keys and values."""
        return cls(keys.shape[-3], keys.shape[-1], values.shape[-1], keys.dtype)

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


@dataclass(frozen=True)
class KvSlice:
    """Keys and values of positions start .. stop-1 of one sample, counted from the prompt's first token."""

    start: int
    stop: int
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Keys and values of each layer, [heads, stop - start, size], in host memory."""


@dataclass(frozen=True)
class Room:
    """What a sample that comes with its KV cache may bring."""

    key: SampleKey
    shapes: tuple[KvShape, ...]
    known: int
    """Positions at the offer, about."""
    longest: int
    """Positions at most."""


class Cost(NamedTuple):
    """One pass over `batch` samples of `tokens` tokens each."""

    batch: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class EngineCosts:
    """What decoding costs on an engine."""

    decode: tuple[Cost, ...]
    """A step; tokens are those in each sample's cache."""
    prefill: tuple[Cost, ...]
    """Tokens are those of each prompt."""
    kv_bytes_per_token: int
    kv_room_bytes: int
    """For caches; 0: not limited by the device."""
    max_batch_size: int
    replays: bool
    """A sample resumed from its tokens decodes them again."""


class EngineError(Exception):
    """A request that an engine cannot take; `field` is the manifest path a user can change, if any."""

    def __init__(self, reason: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field


class KvMoves(Protocol):
    """What an engine can do whose samples may move to another worker with their caches. Called between two steps.

    A moved sample goes on as if it had never moved: the same tokens, and in deterministic mode the same bits.
    """

    layout: str
    """Fingerprint of everything two engines must have in common for a cache of one to be read by the other."""
    shapes: tuple[KvShape, ...]
    """Layer by layer."""

    @property
    def bytes_per_token(self) -> int:
        """Of all layers."""

    def cached(self, key: SampleKey) -> int | None:
        """Positions in the sample's cache, 0 while it waits for a slot; None when it is not here or is finished."""

    def carried(self, key: SampleKey) -> Request:
        """The request that goes on after the sample's last token elsewhere."""

    def export(self, key: SampleKey, start: int, stop: int) -> KvSlice:
        """A copy of part of the cache; stop is at most `cached`."""

    def pause(self, key: SampleKey, paused: bool) -> None:
        """A paused sample is not decoded on; it keeps its slot."""

    def reserve(self) -> bool:
        """Keeps a slot free for a sample that arrives; False when there is none: held ones are never pushed out."""

    def release(self) -> None:
        """Gives a reserved slot back."""

    def admit(self, request: Request, cache: KvSlice | None) -> None:
        """Takes a sample into a reserved slot (given back on EngineError). Without a cache it is computed here."""


class Engine(Protocol):
    """Continuous batching over one model. Not thread-safe."""

    version: int
    """Weight version held."""
    moves: KvMoves | None
    """None: this engine's samples move by their tokens only."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes all of them or, with an EngineError naming the first that is wrong, none."""

    def step(self) -> StepReport:
        """Admits queued samples and decodes one token of every admitted one."""

    def progress(self) -> list[Response]:
        """Tokens of unfinished samples that no earlier `progress` returned."""

    def withdraw(self, keys: Sequence[SampleKey] | None = None) -> list[Response]:
        """Drops these samples (None: all) and returns their tokens so far; unknown and finished ones are left out."""

    def load_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> int:
        """Replaces all weights or none; returns bytes. Samples in flight go on, their later tokens bear `version`."""

    def sleep(self) -> None:
        """Frees KV memory and the device's weights; samples must have been withdrawn."""

    def wake(self) -> None:
        """Undoes sleep, where it sleeps."""

    def measure(self) -> Generator[None, None, EngineCosts]:
        """Times made-up work, a bounded piece a step of the iterator; leaves the engine and its samples as they are."""

    @property
    def held(self) -> int:
        """Samples submitted and neither reported finished nor withdrawn."""
