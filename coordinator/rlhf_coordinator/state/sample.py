"""One sample: its state, the response so far, its workers, and its known fields.

Rule: plain data.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from rlhf_common.samples import Episode, Lease, VersionSpan
from rlhf_coordinator.state.decode_failures import NO_FAULTS, DecodeFailures

ITEM_BYTES: Final = 4
"""Bytes of an item of a packed array, int32 or float32."""


class SampleState(StrEnum):
    """The state of a sample."""

    QUEUED = "queued"
    DECODING = "decoding"
    MIGRATING = "migrating"
    GENERATED = "generated"
    SCORED = "scored"
    TRAINED = "trained"
    FAILED = "failed"
    """No worker could decode it; the iteration continues without it."""
    DROPPED = "dropped"
    """No two scored responses to its prompt have different rewards (`batch_refill`)."""
    CUT = "cut"
    """Its prompt was a surplus one (`scheduling.oversampling`); the iteration continues without it."""


class Origin(NamedTuple):
    """The iteration in which a sample began, and its number there."""

    iteration: int
    sample: int
    """Number of the sample in that iteration."""


@dataclass(frozen=True, slots=True)
class PackedResponse:
    """A response, or its known part: parallel packed arrays and the weight versions that sampled them."""

    tokens: bytes = b""
    """int32, little endian."""
    log_probabilities: bytes = b""
    """float32, little endian, one per token; empty for a response of the prompt file."""
    versions: tuple[VersionSpan, ...] = ()
    """Spans in the order of the tokens. Empty for a response of the prompt file."""

    def __len__(self) -> int:
        return len(self.tokens) // ITEM_BYTES

    def with_tokens(self, offset: int, more: "PackedResponse") -> "PackedResponse":
        """Return the first `offset` tokens of this response, followed by all of `more`."""
        cut = offset * ITEM_BYTES
        return PackedResponse(
            self.tokens[:cut] + more.tokens,
            self.log_probabilities[:cut] + more.log_probabilities,
            join_spans(first_tokens(self.versions, offset), more.versions),
        )

    def continues(self, carried: "PackedResponse", version: int) -> bool:
        """Return whether it consists of the carried response, or a beginning of it, and then tokens of this version.

        Tokens and versions are compared.
        """
        shared = min(len(carried), len(self))
        more = len(self) - shared
        wanted = join_spans(first_tokens(carried.versions, shared), (VersionSpan(version, more),) if more else ())
        same = self.tokens[: shared * ITEM_BYTES] == carried.tokens[: shared * ITEM_BYTES]
        return same and joined(self.versions) == wanted


@dataclass(slots=True)
class Sample:
    """One sample and its known fields."""

    index: int
    origin: Origin
    """Origin in this iteration, unless the sample was carried into it."""
    greedy: bool = False
    """Whether it is decoded greedily: a baseline for the others, not trained on."""
    state: SampleState = SampleState.QUEUED
    attempt: int = 0
    """Highest attempt of its leases and promises; before the first, the number from which the process counts."""
    decoding: Lease | None = None
    arriving: Lease | None = None
    """Future lease of a sample that migrates with its KV cache."""
    immovable: bool = False
    """Whether a move with its KV cache failed."""
    response: PackedResponse = field(default_factory=PackedResponse)
    finish_reason: str = ""
    text: str = ""
    carried: PackedResponse = field(default_factory=PackedResponse)
    """Part of its response that earlier iterations drew."""
    fields: dict[str, bytes] = field(default_factory=dict)
    """Field name of the graph -> float32 values."""
    reward_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Task -> extra values of its reward, by name."""
    abstained: bool = False
    scoring: dict[str, Lease] = field(default_factory=dict)
    """Task in progress -> its lease."""
    open_tasks: set[str] = field(default_factory=set)
    """Own tasks that are open: not leased and not done."""
    group_tasks: set[str] = field(default_factory=set)
    """Tasks of its prompt's group whose result it lacks."""
    failures: Counter[str] = field(default_factory=Counter)
    """Task -> number of failed attempts after which it was open again, since the coordinator started."""
    failed_on: dict[str, str] = field(default_factory=dict)
    """Task -> worker of the last failed attempt."""
    not_before: float = 0.0
    """Moment before which its failed tasks are not retried."""
    faults: DecodeFailures = NO_FAULTS
    """Decode failures of the sample."""
    given_up: bool = False
    """Whether it was given up after decode failures, regardless of its current state."""
    isolated: bool = False
    """Whether it must be decoded alone."""
    decoded_by: list[str] = field(default_factory=list)
    """Workers that leased it for decoding, in order, without direct repetition."""
    drafted_tokens: int = 0
    """Draft tokens verified for it on the worker where it ended."""
    accepted_tokens: int = 0
    """Accepted tokens among them."""
    episode: Episode | None = None
    """Environment's result for the whole response, where the job has an environment."""

    @property
    def failed(self) -> bool:
        """Whether its state is FAILED."""
        return self.state is SampleState.FAILED

    @property
    def left_out(self) -> bool:
        """Whether it failed or was cut off."""
        return self.state in (SampleState.FAILED, SampleState.CUT)

    @property
    def unfinished(self) -> bool:
        """Whether it has no complete response yet, but may get one."""
        return self.state in (SampleState.QUEUED, SampleState.DECODING, SampleState.MIGRATING)


def first_tokens(versions: Sequence[VersionSpan], tokens: int) -> tuple[VersionSpan, ...]:
    """Return the spans of the first `tokens` tokens."""
    spans: list[VersionSpan] = []
    for version, count in versions:
        if tokens <= 0:
            break
        spans.append(VersionSpan(version, min(count, tokens)))
        tokens -= count
    return tuple(spans)


def join_spans(left: tuple[VersionSpan, ...], right: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """Concatenate spans; merge the two that meet if they are of one version."""
    if left and right and left[-1].version == right[0].version:
        merged = VersionSpan(left[-1].version, left[-1].tokens + right[0].tokens)
        return (*left[:-1], merged, *right[1:])
    return left + right


def joined(versions: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Return the same spans with neighbours of one version merged."""
    result: list[VersionSpan] = []
    for span in versions:
        if result and result[-1].version == span.version:
            result[-1] = VersionSpan(span.version, result[-1].tokens + span.tokens)
        else:
            result.append(span)
    return tuple(result)
