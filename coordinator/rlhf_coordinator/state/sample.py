"""One sample: its state, the response so far, who works on it, and what is known of it.

Rule: plain data; only `ledger.Ledger` changes it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

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


@dataclass(frozen=True, slots=True)
class Response:
    """A response, or the part of one that exists: parallel packed arrays and the weight versions that sampled them."""

    tokens: bytes = b""
    """int32, little endian."""
    log_probabilities: bytes = b""
    """float32, little endian, one a token."""
    versions: tuple[tuple[int, int], ...] = ()
    """(weight version, tokens) spans, first tokens first."""

    def __len__(self) -> int:
        return len(self.tokens) // ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one worker to work on a sample; what it says counts only under this attempt."""

    worker: str
    attempt: int


@dataclass(slots=True)
class Sample:
    """One sample and all that is known of it."""

    index: int
    state: SampleState = SampleState.QUEUED
    attempt: int = 0
    """Number of the last lease, of any kind."""
    decoding: Lease | None = None
    arriving: Lease | None = None
    """Migrating with its KV cache: whose it will be."""
    immovable: bool = False
    """Its KV cache could not be moved once: it is moved by its tokens."""
    response: Response = field(default_factory=Response)
    finish_reason: str = ""
    text: str = ""
    fields: dict[str, bytes] = field(default_factory=dict)
    """Field name of the graph -> float32 values."""
    abstained: bool = False
    scoring: dict[str, Lease] = field(default_factory=dict)
    """Task in progress -> who does it."""
    open_tasks: set[str] = field(default_factory=set)
    """Tasks nobody does yet."""
    failures: Counter[str] = field(default_factory=Counter)
    """Task -> failed tries."""
    failed_on: dict[str, str] = field(default_factory=dict)
    """Task -> worker of the last failed try; the next one goes elsewhere if it can."""
    not_before: float = 0.0
    """Its failed tasks are not tried again before this time."""
    decoded_by: list[str] = field(default_factory=list)
    """Workers it was decoded on, in order."""


def first_tokens(versions: Sequence[tuple[int, int]], tokens: int) -> tuple[tuple[int, int], ...]:
    """The spans of the first tokens."""
    kept: list[tuple[int, int]] = []
    for version, count in versions:
        if tokens <= 0:
            break
        kept.append((version, min(count, tokens)))
        tokens -= count
    return tuple(kept)


def join_spans(left: tuple[tuple[int, int], ...], right: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Spans after one another; neighbours of one version become one."""
    if left and right and left[-1][0] == right[0][0]:
        merged = (left[-1][0], left[-1][1] + right[0][1])
        return (*left[:-1], merged, *right[1:])
    return left + right
