"""One sample: its state, the response so far, who works on it, and what is known of it.

Rule: plain data; only the ledger and its scoring table change it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from rlhf_common.samples import Episode, Lease, VersionSpan
from rlhf_coordinator.state.decode_failures import NO_FAULTS, DecodeFailures

ITEM_BYTES: Final = 4
"""Tokens are int32 and everything else is float32."""


class SampleState(StrEnum):
    """The one state a sample is in."""

    QUEUED = "queued"
    DECODING = "decoding"
    MIGRATING = "migrating"
    GENERATED = "generated"
    SCORED = "scored"
    TRAINED = "trained"
    FAILED = "failed"
    """No worker could decode it; the iteration goes on without it."""
    DROPPED = "dropped"
    """All responses to its prompt are worth the same, and another prompt takes its place."""
    CUT = "cut"
    """Its prompt is beyond those of the batch, and others were finished first; the iteration goes on without it."""


class Origin(NamedTuple):
    """Where a sample was begun: its prompt and its random key follow from that, wherever it is gone on with."""

    iteration: int
    sample: int
    """Its number in that iteration."""


@dataclass(frozen=True, slots=True)
class PackedResponse:
    """A response, or the part of one that exists: parallel packed arrays and the weight versions that sampled them."""

    tokens: bytes = b""
    """int32, little endian."""
    log_probabilities: bytes = b""
    """float32, little endian, one per token."""
    versions: tuple[VersionSpan, ...] = ()
    """First tokens first; their tokens sum to the length."""

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
        """Return whether it is what was carried, or the beginning of that, and then tokens of one version alone."""
        known = min(len(carried), len(self))
        more = len(self) - known
        wanted = join_spans(first_tokens(carried.versions, known), (VersionSpan(version, more),) if more else ())
        same = self.tokens[: known * ITEM_BYTES] == carried.tokens[: known * ITEM_BYTES]
        return same and joined(self.versions) == wanted


@dataclass(slots=True)
class Sample:
    """One sample and all that is known of it."""

    index: int
    origin: Origin
    """Of this iteration, unless it was carried into it."""
    greedy: bool = False
    """It is decoded greedily: what others are held against, and not trained on."""
    state: SampleState = SampleState.QUEUED
    attempt: int = 0
    """Number of the last lease, of any kind."""
    decoding: Lease | None = None
    arriving: Lease | None = None
    """Migrating with its KV cache: whose it will be."""
    immovable: bool = False
    """Its KV cache could not be moved once: it is moved by its tokens."""
    response: PackedResponse = field(default_factory=PackedResponse)
    finish_reason: str = ""
    text: str = ""
    carried: PackedResponse = field(default_factory=PackedResponse)
    """What an earlier iteration drew of its response."""
    fields: dict[str, bytes] = field(default_factory=dict)
    """Field name of the graph -> float32 values."""
    reward_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Task -> what its reward gave beside its number, by name."""
    abstained: bool = False
    scoring: dict[str, Lease] = field(default_factory=dict)
    """Task in progress -> who does it."""
    open_tasks: set[str] = field(default_factory=set)
    """Tasks of its own that nobody does yet."""
    group_tasks: set[str] = field(default_factory=set)
    """Tasks of its prompt's group whose result it does not have."""
    failures: Counter[str] = field(default_factory=Counter)
    """Task -> failed tries."""
    failed_on: dict[str, str] = field(default_factory=dict)
    """Task -> worker of the last failed try; the next one goes elsewhere if it can."""
    not_before: float = 0.0
    """Its failed tasks are not tried again before this time."""
    faults: DecodeFailures = NO_FAULTS
    """What failed while it was decoded."""
    given_up: bool = False
    """It failed, whatever became of it after that."""
    isolated: bool = False
    """It is decoded alone, after the others."""
    decoded_by: list[str] = field(default_factory=list)
    """Workers it was decoded on, in order."""
    drafted_tokens: int = 0
    """That were drafted for it and verified, where it ended."""
    accepted_tokens: int = 0
    """Of them."""
    episode: Episode | None = None
    """What an environment said of the whole response, where the job has one."""

    @property
    def failed(self) -> bool:
        """Whether the iteration goes on without it."""
        return self.state is SampleState.FAILED

    @property
    def left_out(self) -> bool:
        """Whether nothing of it is trained on: it failed, or was cut off."""
        return self.state in (SampleState.FAILED, SampleState.CUT)

    @property
    def unfinished(self) -> bool:
        """Whether it has no complete response, and may still get one."""
        return self.state in (SampleState.QUEUED, SampleState.DECODING, SampleState.MIGRATING)


def first_tokens(versions: Sequence[VersionSpan], tokens: int) -> tuple[VersionSpan, ...]:
    """Return the spans of the first so many tokens."""
    kept: list[VersionSpan] = []
    for version, count in versions:
        if tokens <= 0:
            break
        kept.append(VersionSpan(version, min(count, tokens)))
        tokens -= count
    return tuple(kept)


def join_spans(left: tuple[VersionSpan, ...], right: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """Return spans after one another; neighbours of one version become one."""
    if left and right and left[-1].version == right[0].version:
        merged = VersionSpan(left[-1].version, left[-1].tokens + right[0].tokens)
        return (*left[:-1], merged, *right[1:])
    return left + right


def joined(versions: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Return the same spans, of which neighbours have different versions."""
    result: list[VersionSpan] = []
    for span in versions:
        if result and result[-1].version == span.version:
            result[-1] = VersionSpan(span.version, result[-1].tokens + span.tokens)
        else:
            result.append(span)
    return tuple(result)
