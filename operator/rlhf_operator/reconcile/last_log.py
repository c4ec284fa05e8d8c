"""The end of a container's log, which the kubelet keeps in the pod's status: lines to read, and the last report.

Rule: pure. Our processes write one JSON object a line, of which people want the words; a line that the kubelet cut at
its front is saved as far as it goes. The pod may be gone a minute later, so what is kept here is all that is left.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

KEPT: Final = 1000
"""Characters of a log that are kept: the last lines of a traceback; a thousand pods a job are in memory."""
_ESCAPE: Final = 6
"""Longest escape of JSON, which a cut may fall into."""

_TEXT: Final = re.compile(r'"(message|traceback)": ("(?:[^"\\]|\\.)*")')
"""A text of an object that was cut before it."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a coordinator says last: as its status, which nobody could read after it."""

    iteration: int
    """Iterations trained."""
    checkpoint: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last iteration."""


def readable(log: str) -> str:
    """The last lines, in plain words; the very last says why the process ended."""
    # Of a traceback's marks below the line nothing is left without the line's own place.
    lines = [line for entry in log.splitlines() for line in _lines(entry) if line.strip(" ^~")]
    text = "\n".join(lines)
    if len(text) <= KEPT:
        return text
    _, _, whole = text[-KEPT:].partition("\n")
    return whole or text[-KEPT:]


def last_report(log: str) -> Report | None:
    """The coordinator's, when it came to that."""
    for line in reversed(log.splitlines()):
        found = _entry(line).get("report")
        if isinstance(found, dict):
            metrics = {
                str(name): float(value)
                for name, value in (found.get("metrics") or {}).items()
                if isinstance(value, int | float)
            }
            return Report(int(found.get("iteration") or 0), str(found.get("checkpoint") or ""), metrics)
    return None


def _entry(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _lines(line: str) -> Iterator[str]:
    entry = _entry(line)
    if "message" in entry:
        yield from _told(entry)
    elif line.endswith('"}') and not line.startswith("{"):
        yield from _told({name: json.loads(text) for name, text in _TEXT.findall(line)} or {"traceback": _cut(line)})
    elif line.strip():
        yield line.rstrip()


def _told(entry: Mapping[str, Any]) -> Iterator[str]:
    trace = str(entry.get("traceback") or "").rstrip().splitlines()
    # It ends with the error, which the message says too, and says better.
    yield from trace[:-1] if "message" in entry else trace
    if "message" in entry:
        yield str(entry["message"])


def _cut(line: str) -> str:
    """What is left of an object that the kubelet cut inside its last text."""
    for skipped in range(_ESCAPE):
        try:
            return str(json.loads(f'"{line[skipped:-1]}'))
        except ValueError:
            continue
    return line
