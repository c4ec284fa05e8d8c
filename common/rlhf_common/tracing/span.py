"""A span that is over, and its ids. Pure.

Rule: ids are hashes of what a span is about and of the run's own random name, so every process of a job finds the trace
of an iteration without being told, and a span that is made again is the same span.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

TRACE_BYTES: Final = 16
SPAN_BYTES: Final = 8

Attribute = str | int | float | bool


@dataclass(frozen=True)
class TraceSpan:
    """Something that took time."""

    name: str
    trace: int
    span: int
    parent: int
    """Span that it is part of; 0: the trace begins with it."""
    start_ns: int
    """Since the Unix epoch."""
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    failure: str = ""
    """Why what it tells did not succeed; empty: it did."""


def trace_id(run: str, *about: object) -> int:
    """Return the id of a trace of a run, such as that of an iteration."""
    return _number(TRACE_BYTES, run, *about)


def span_id(trace: int, *about: object) -> int:
    """Return the id of a span in a trace."""
    return _number(SPAN_BYTES, trace_words(trace), *about)


def trace_words(trace: int) -> str:
    """Return a trace id as it is written everywhere: 32 hexadecimal digits."""
    return f"{trace:0{2 * TRACE_BYTES}x}"


def iteration_trace(run: str, iteration: int) -> str:
    """Return the trace id of an iteration, as log lines have it; empty for a run without traces."""
    return trace_words(trace_id(run, "iteration", iteration)) if run else ""


def is_sampled(trace: int, share: float, *about: object) -> bool:
    """Return whether something of a trace is among the share that is told: the same answer whenever it is asked."""
    return _number(SPAN_BYTES, trace_words(trace), "sampled", *about) < share * 256**SPAN_BYTES


def _number(size: int, *about: object) -> int:
    text = "\0".join(map(str, about)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=size).digest(), "big") or 1  # 0 means none
