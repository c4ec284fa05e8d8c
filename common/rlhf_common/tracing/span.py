"""A finished span and its ids. Pure.

Rule: ids are hashes of the span's subject and the run's name, so a repeated span has the same id.
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
    """An activity with a duration."""

    name: str
    trace: int
    span: int
    parent: int
    """Parent span; 0: the trace starts with this span."""
    start_ns: int
    """Nanoseconds since the Unix epoch."""
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    failure: str = ""
    """Reason of the failure; empty if it succeeded."""


def trace_id(run: str, *about: object) -> int:
    """Return the id of a trace of a run, such as that of an iteration."""
    return _number(TRACE_BYTES, run, *about)


def span_id(trace: int, *about: object) -> int:
    """Return the id of a span in a trace."""
    return _number(SPAN_BYTES, trace_words(trace), *about)


def trace_words(trace: int) -> str:
    """Return a trace id as text: 32 hexadecimal digits."""
    return f"{trace:0{2 * TRACE_BYTES}x}"


def iteration_trace(run: str, iteration: int) -> str:
    """Return the trace id of an iteration, as in log lines; empty for a run without traces."""
    return trace_words(trace_id(run, "iteration", iteration)) if run else ""


def is_sampled(trace: int, share: float, *about: object) -> bool:
    """Return whether an item of a trace is in the sampled share; the answer is always the same."""
    return _number(SPAN_BYTES, trace_words(trace), "sampled", *about) < share * 256**SPAN_BYTES


def _number(size: int, *about: object) -> int:
    text = "\0".join(map(str, about)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=size).digest(), "big") or 1  # 0 means none
