"""Interface between the generation role and the engine that decodes.

An engine implements `Engine` and, for more abilities, some of the Protocols below; `engine_registry` finds it. Rule:
plain data, not protobuf messages. One thread drives an engine. An engine must never lose a sample: it reports it as
finished, or `withdraw` returns it with every token.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from prometheus_client.registry import Collector

from rlhf_api.algorithms import has_greedy_baseline
from rlhf_api.job import RLHFJobSpec
from rlhf_common.samples import ResponsePart, SampleKey, SampleRequest
from rlhf_workers.models.kv_slices import KvShape, KvSlice


@dataclass(frozen=True)
class EngineLimits:
    """Sizes that an engine is built for."""

    max_batch_size: int
    """Maximum samples decoded at once; more wait."""
    max_prompt_tokens: int
    max_response_tokens: int

    @classmethod
    def from_spec(cls, spec: RLHFJobSpec) -> "EngineLimits":
        """Return the sizes of a job."""
        rollout = spec.rollout
        return cls(spec.generation.max_batch_size, rollout.max_prompt_tokens, rollout.max_response_tokens)


@dataclass(frozen=True)
class SamplingParameters:
    """How a token is drawn from the logits."""

    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy, with log-probabilities at temperature 1."""
    top_p: float = 1.0
    """Least total probability of the most probable tokens to draw from; 1 allows all."""
    top_k: int = 0
    """Number of most probable tokens to draw from; 0 allows all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response and stay in it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response and stay in it, beside those of the tokenizer and the model."""
    by_request: bool = False
    """Whether requests may choose how their tokens are drawn; otherwise all are drawn alike."""
    evaluation_temperature: float = 0.0
    """Temperature of evaluation requests that draw at random; 0: there are none."""

    @classmethod
    def from_spec(cls, spec: RLHFJobSpec) -> "SamplingParameters":
        """Return the sampling parameters of a job."""
        rollout = spec.rollout
        return cls(
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            tuple(rollout.stop),
            tuple(rollout.stop_token_ids),
            by_request=spec.evaluation is not None or has_greedy_baseline(spec),
            evaluation_temperature=0.0 if spec.evaluation is None else spec.evaluation.temperature,
        )

    @property
    def random(self) -> bool:
        """Whether any token is drawn at random, so that uniforms are needed."""
        return self.temperature > 0 or self.evaluation_temperature > 0


class Prefill(NamedTuple):
    """The prefill of a batch of samples."""

    samples: int
    tokens: int
    """Tokens of all samples together."""
    resumed: bool
    """Whether all were samples with a response, whose tokens were prefilled too."""


@dataclass
class StepReport:
    """Results and counts of one step."""

    finished: list[ResponsePart] = field(default_factory=list)
    """Whole responses."""
    decoded: int = 0
    """Sampled tokens."""
    prefilled: int = 0
    """Known tokens that were prefilled or replayed."""
    prefill_ns: int = 0
    """Nanoseconds of prefill."""
    prefills: list[Prefill] = field(default_factory=list)
    """Prefills of the step."""
    reused: int = 0
    """Tokens in the caches of samples that continued with the cache of their last turn."""
    replayed: int = 0
    """Rows of decode passes that decoded a known token again."""
    replayed_samples: int = 0
    """Samples whose known tokens were decoded again."""
    rows: int = 0
    """Samples in decode passes."""
    keys: int = 0
    """Keys that all rows of its decode passes read, added up; an engine may count padding."""
    began: list[SampleKey] = field(default_factory=list)
    """Samples that got their first new token since they came; empty if the engine does not know."""
    pass_rows: int = 0
    """Rows of its decode passes without padding: one per sample, and more for drafted or replayed tokens."""
    positions: int = 0
    """Cache positions of all samples in decode passes, added up."""
    drafted: int = 0
    """Drafted tokens that were verified; an engine may omit those after the end of a response."""
    accepted: int = 0
    """Accepted drafted tokens; they are among `decoded`."""
    draft_ns: int = 0
    """Nanoseconds of drafting."""
    verify_ns: int = 0
    """Nanoseconds of the passes, if one decoded several positions of a sample; else 0."""
    passes: int = 0
    """Decode passes; all passes for an engine that prefills and decodes in the same ones."""
    graph_passes: int = 0
    """Decode passes replayed from a capture."""
    fused_passes: int = 0
    """Decode passes run by fused kernels."""
    capture_ns: int = 0
    """Nanoseconds of capturing graphs."""


class PassCost(NamedTuple):
    """Cost of a pass over `batch` samples with `tokens` tokens each."""

    batch: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class EngineCosts:
    """Costs of decoding on an engine."""

    decode: tuple[PassCost, ...]
    """Costs of a step; tokens are those in each sample's cache."""
    prefill: tuple[PassCost, ...]
    """Costs of prefill; tokens are those prefilled of each sample."""
    kv_bytes_per_token: int
    kv_room_bytes: int
    """Bytes for caches; 0: not limited by the device."""
    max_batch_size: int
    replays: bool
    """Whether a sample resumed from its tokens decodes them again."""


class EngineLoad(NamedTuple):
    """Load of an engine after its last step, and statistics since it was built."""

    running: int
    """Samples in the batch."""
    waiting: int
    """Samples outside the batch: without a place in it or in the caches, or paused."""
    kv_used: float
    """Used share of the caches, 0..1."""
    preemptions: int
    """Times that a sample lost its place to others, since the engine was built."""
    prefix_tokens: int
    """Tokens looked up in the prefix cache since the engine was built."""
    prefix_hits: int
    """Tokens found in the prefix cache since the engine was built."""


class EngineError(Exception):
    """A request that an engine cannot take, or an operation that it cannot do. `field` is the manifest path that a user
    can change, if any.

    With a `key`, the cause is this one sample, which the engine still owns.
    """

    def __init__(self, reason: str, message: str, field: str = "", key: SampleKey | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field
        self.key = key


@runtime_checkable
class Engine(Protocol):
    """Continuous batching over one model. Not thread-safe."""

    version: int
    """Weight version; `worker_role.NO_VERSION` after an interrupted update, until a complete version is loaded."""

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Take all requests, or raise EngineError that names an invalid one and take none."""

    def step(self) -> StepReport:
        """Admit queued samples and decode tokens of admitted samples that are not paused.

        An EngineError with a key concerns that sample; any other exception concerns the whole engine.
        """

    def progress(self) -> list[ResponsePart]:
        """Return parts of unfinished samples, with at least the tokens drawn since the last `progress`."""

    def withdraw(self, keys: Sequence[SampleKey] | None = None) -> list[ResponsePart]:
        """Drop these samples (None: all) and return their tokens; unknown and finished ones are ignored."""

    def load_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> int:
        """Replace all weights; return bytes. Samples continue, and later tokens carry `version`.

        Raises WorkError for invalid tensors, without a change. An update interrupted half-way raises and leaves
        NO_VERSION.
        """

    @property
    def in_flight(self) -> int:
        """Number of samples that came here, and are neither reported as finished nor withdrawn."""


# ------------------------------------------------------------ optional abilities of an engine, found by isinstance


@runtime_checkable
class Sleeps(Protocol):
    """An engine that can free device memory."""

    def sleep(self) -> None:
        """Free memory of KV caches and weights, as far as the engine can; it must have no samples."""

    def wake(self) -> None:
        """Make the engine ready to decode, if it sleeps."""


@runtime_checkable
class TakesWeightsWhileOffloaded(Sleeps, Protocol):
    """An engine whose `load_weights` may work in host memory while its weights are offloaded."""

    takes_weights_while_offloaded: bool


@runtime_checkable
class KeepsTurns(Protocol):
    """An engine that can keep a finished sample's cache until the sample is submitted with more tokens."""

    def keep_turns(self) -> None:
        """Keep the cache of each response that ends by a stop, until its use, `forget_turn`, sleep or new weights.

        An engine may drop caches earlier.
        """

    def forget_turn(self, key: SampleKey) -> None:
        """Drop the cache of a sample, if there is one."""


@runtime_checkable
class TakesDraftsAhead(Protocol):
    """An engine that may decode samples of a later iteration (`rlhf_common.samples.is_ahead`) beside its speculator,
    which never hears of them."""

    takes_drafts_ahead: bool


@runtime_checkable
class ServesMetrics(Protocol):
    """An engine with its own metrics, such as vLLM."""

    @property
    def registry(self) -> Collector:
        """Collector of its Prometheus metrics; another thread may read it."""


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine with its own queue and caches, which reports how full they are."""

    @property
    def load(self) -> EngineLoad:
        """Return the load after the last step."""


@runtime_checkable
class MeasuresCosts(Protocol):
    """An engine that can measure its costs."""

    def measure(self) -> Generator[None, None, EngineCosts]:
        """Time artificial work, one bounded part per step of the iterator; samples stay unchanged."""


class KvMoves(Protocol):
    """Moves samples with their KV caches between two steps."""

    layout: str
    """Fingerprint that two engines must share so that one can read the other's caches of the same weights."""
    shapes: tuple[KvShape, ...]
    """Shape of each layer, in order."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""

    def cached(self, key: SampleKey) -> int | None:
        """Return the number of positions that `export` can copy; None if the sample is gone or finished."""

    def carried(self, key: SampleKey) -> SampleRequest:
        """Return the request that continues the sample elsewhere."""

    def export(self, key: SampleKey, start: int, stop: int) -> KvSlice:
        """Return a copy of part of the cache; `stop` is at most `cached`."""

    def pause(self, key: SampleKey, paused: bool) -> None:
        """Pause or resume a sample; a paused one gets no token."""

    def reserve(self) -> bool:
        """Reserve a slot for a sample that arrives; return False if none is free. Never displaces a sample."""

    def release(self) -> None:
        """Release a reserved slot."""

    def admit(self, request: SampleRequest, cache: KvSlice | None) -> None:
        """Take a sample in place of a reservation, which an EngineError ends too; without a cache, compute it here."""


@runtime_checkable
class MovesKvCaches(Protocol):
    """An engine whose samples can move with their caches."""

    @property
    def moves(self) -> KvMoves | None:
        """The mover of caches; None if caches of this model or job do not move."""


def kv_moves_of(engine: Engine) -> KvMoves | None:
    """Return the mover of an engine's caches; None if it has none."""
    return engine.moves if isinstance(engine, MovesKvCaches) else None
