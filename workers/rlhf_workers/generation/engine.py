"""What a generation engine is: the seam between the generation role and whatever decodes.

An engine implements `Engine`, and those of the Protocols below it that name what it can do besides; `engine_registry`
says how it is found. Rule: plain data in and out, no messages of the wire. An engine is driven by one thread; `step` is
one bounded piece of work. A sample's tokens depend on its prompt, its random key, the weights and the sampling
parameters: never on what else is decoded, where, or in how many pieces. An engine must never lose a sample: until it is
in `StepReport.finished`, `withdraw` returns it with every token.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, runtime_checkable

import torch
from prometheus_client.registry import Collector

from rlhf_api.algorithms import has_greedy_baseline
from rlhf_api.job import RLHFJobSpec
from rlhf_common.samples import ResponsePart, SampleKey, SampleRequest
from rlhf_workers.models.kv_slices import KvShape, KvSlice

NO_VERSION: Final = -1
"""Of an engine whose weights are of no one version: it takes and decodes no sample."""


@dataclass(frozen=True)
class EngineLimits:
    """Sizes an engine is built for."""

    max_batch_size: int
    """Samples decoded at once; more wait."""
    max_prompt_tokens: int
    max_response_tokens: int

    @classmethod
    def from_spec(cls, spec: RLHFJobSpec) -> "EngineLimits":
        """Return the sizes that a job asks for."""
        rollout = spec.rollout
        return cls(spec.generation.max_batch_size, rollout.max_prompt_tokens, rollout.max_response_tokens)


@dataclass(frozen=True)
class SamplingParameters:
    """How a token is drawn from the logits."""

    temperature: float = 1.0
    """0 is greedy; log-probabilities are then those at temperature 1."""
    top_p: float = 1.0
    """Smallest set of most probable tokens with this much probability; 1 keeps all."""
    top_k: int = 0
    """Number of most probable tokens that are kept; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; kept in it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside the tokenizer's end-of-sequence token; kept in it."""
    by_request: bool = False
    """Requests say how their tokens are drawn; else all are drawn alike."""
    evaluation_temperature: float = 0.0
    """Of requests that are drawn for evaluation, above 0; 0: there are none."""

    @classmethod
    def from_spec(cls, spec: RLHFJobSpec) -> "SamplingParameters":
        """Return how a job draws tokens."""
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
        """Whether some token is drawn at random: uniforms are needed."""
        return self.temperature > 0 or self.evaluation_temperature > 0


class Prefill(NamedTuple):
    """One pass over samples that begin, or go on, here."""

    samples: int
    tokens: int
    """Tokens of all of them together."""
    resumed: bool
    """All were samples with a response, whose tokens went through it too."""


@dataclass
class StepReport:
    """What one step did."""

    finished: list[ResponsePart] = field(default_factory=list)
    """Whole responses."""
    decoded: int = 0
    """Tokens sampled."""
    prefilled: int = 0
    """Prompt tokens (and replayed response tokens) run through the model."""
    prefill_ns: int = 0
    """Time of it that prefill took."""
    prefills: list[Prefill] = field(default_factory=list)
    """What that time was spent on."""
    kept: int = 0
    """Tokens of samples that went on with the cache of their last turn."""
    replayed: int = 0
    """Rows of decode passes that decoded a known token again."""
    replayed_samples: int = 0
    """Samples that these rows are of."""
    rows: int = 0
    """Samples that went through a decode pass."""
    keys: int = 0
    """Keys that were read, of all rows of its passes together, those of drafted tokens among them."""
    began: list[SampleKey] = field(default_factory=list)
    """Samples that got their first new token since they were submitted; an engine that cannot tell leaves it empty."""
    pass_rows: int = 0
    """Rows of its decode passes, padding left out: one a sample, and more where tokens were drafted or replayed."""
    positions: int = 0
    """Positions in the caches of the samples that were decoded, all together."""
    drafted: int = 0
    """Tokens that were guessed and verified."""
    accepted: int = 0
    """Those of them that are among `decoded`."""
    draft_ns: int = 0
    """Time of it that drafting took."""
    verify_ns: int = 0
    """Time of it that passes took in which several positions of a sample were decoded."""
    passes: int = 0
    """Decode passes."""
    graph_passes: int = 0
    """Those of them that were replayed from a graph."""
    fused_passes: int = 0
    """Those of them that ran by kernels of several steps each."""
    capture_ns: int = 0
    """Time of it that capturing graphs took."""


class PassCost(NamedTuple):
    """One pass over `batch` samples of `tokens` tokens each."""

    batch: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class EngineCosts:
    """What decoding costs on an engine."""

    decode: tuple[PassCost, ...]
    """A step; tokens are those in each sample's cache."""
    prefill: tuple[PassCost, ...]
    """Tokens are those of each prompt."""
    kv_bytes_per_token: int
    kv_room_bytes: int
    """For caches; 0: not limited by the device."""
    max_batch_size: int
    replays: bool
    """A sample resumed from its tokens decodes them again."""


class EngineLoad(NamedTuple):
    """What is in an engine now, and what its caches did since it was built."""

    running: int
    """Samples that are decoded."""
    waiting: int
    """Samples that have no place in the batch or in the caches yet."""
    kv_used: float
    """Share of the caches that samples hold, 0..1."""
    preemptions: int
    """Times that a sample lost its place to others and was computed again, since the engine was built."""
    prefix_tokens: int
    """Tokens that were looked for among the prefixes of earlier samples, since then."""
    prefix_hits: int
    """Those of them that were found, and not computed again."""


class EngineError(Exception):
    """A request that an engine cannot take, or what it cannot do.

    `field` is the manifest path a user can change, if any. A `key` says that the cause is this one sample, which the
    engine still holds: once it is withdrawn, all others go on. Without one a `step` that raises leaves an engine that
    is not used again, and its worker ends.
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
    """Weight version held; NO_VERSION after an update that broke off half-way, until a whole one was loaded."""

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Takes all of them or, with an EngineError naming the first that is wrong, none."""

    def step(self) -> StepReport:
        """Admits queued samples and decodes one token of every admitted one (an engine that speculates: several).

        An EngineError with a key is of that sample alone; any other exception is the end of the engine.
        """

    def progress(self) -> list[ResponsePart]:
        """Return the tokens of unfinished samples that no earlier `progress` returned."""

    def withdraw(self, keys: Sequence[SampleKey] | None = None) -> list[ResponsePart]:
        """Drops these samples (None: all) and returns their tokens so far; unknown and finished ones are left out."""

    def load_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> int:
        """Replaces all weights or none; returns bytes. Samples in flight go on, their later tokens bear `version`.

        Where it breaks off with some replaced, it raises WorkError and holds NO_VERSION.
        """

    @property
    def held(self) -> int:
        """Number of samples submitted and neither reported finished nor withdrawn."""


# ------------------------------------------------------------ abilities that an engine may have, found by isinstance


@runtime_checkable
class Sleeps(Protocol):
    """An engine that can free its device; one that cannot keeps its memory between iterations."""

    def sleep(self) -> None:
        """Frees KV memory and the device's weights; samples must have been withdrawn."""

    def wake(self) -> None:
        """Undoes sleep, where it sleeps."""


@runtime_checkable
class TakesWeightsWhileOffloaded(Sleeps, Protocol):
    """An engine whose `load_weights` replaces the weights where they are: on the device or, offloaded, on the host."""

    takes_weights_while_offloaded: bool


@runtime_checkable
class KeepsTurns(Protocol):
    """An engine by which a sample that was finished goes on with its cache, when it is submitted with more tokens."""

    def keep_turns(self) -> None:
        """From now on keeps the cache of a response that ends by a stop, until it goes on, `forget_turn` or other
        weights."""

    def forget_turn(self, key: SampleKey) -> None:
        """Lets go of what is kept of a sample, if anything is."""


@runtime_checkable
class ServesMetrics(Protocol):
    """An engine with metrics of its own, such as vLLM: the worker's endpoint serves them beside its own."""

    @property
    def registry(self) -> Collector:
        """What a client of Prometheus collects them from; read by another thread than the engine's."""


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine with a queue and a room for caches of its own, which says how full they are."""

    @property
    def load(self) -> EngineLoad:
        """Return what it is after the last step."""


@runtime_checkable
class MeasuresCosts(Protocol):
    """An engine that can say what its work costs; without it, inter-stage fusion stays Disabled."""

    def measure(self) -> Generator[None, None, EngineCosts]:
        """Times made-up work, a bounded piece a step of the iterator; leaves the engine and its samples as they are."""


class KvMoves(Protocol):
    """Samples that move with their KV caches, between two steps."""

    layout: str
    """Fingerprint of everything two engines must have in common for a cache of one to be read by the other."""
    shapes: tuple[KvShape, ...]
    """One for each layer, in order."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves in all layers."""

    def cached(self, key: SampleKey) -> int | None:
        """Positions in the sample's cache, 0 while it waits for a slot; None when it is not here or is finished."""

    def carried(self, key: SampleKey) -> SampleRequest:
        """The request that goes on after the sample's last token elsewhere."""

    def export(self, key: SampleKey, start: int, stop: int) -> KvSlice:
        """A copy of part of the cache; stop is at most `cached`."""

    def pause(self, key: SampleKey, paused: bool) -> None:
        """A paused sample is not decoded on; it keeps its slot."""

    def reserve(self) -> bool:
        """Keeps a slot free for a sample that arrives; False when there is none: held ones are never pushed out."""

    def release(self) -> None:
        """Gives a reserved slot back."""

    def admit(self, request: SampleRequest, cache: KvSlice | None) -> None:
        """Takes a sample into a reserved slot (given back on EngineError). Without a cache it is computed here."""


@runtime_checkable
class MovesKvCaches(Protocol):
    """An engine whose samples can move with their caches; without it they move by their tokens."""

    @property
    def moves(self) -> KvMoves | None:
        """Return what moves them; None: caches of this model, or of this job, do not move."""


def kv_moves_of(engine: Engine) -> KvMoves | None:
    """Return what moves an engine's caches; None: its samples move by their tokens only."""
    return engine.moves if isinstance(engine, MovesKvCaches) else None
