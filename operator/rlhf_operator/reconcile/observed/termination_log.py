"""The end of a container's log, which the kubelet keeps in the pod's status: lines to read, and the last report.

Rule: pure and total. Our processes write one JSON object a line, of which people want the words; a line that the
kubelet cut at its front is saved as far as it goes. But code of users writes to the same log, so a line may hold
anything: what is no report of the form below is none, and its line is shown like any other. The pod may be gone a
minute later, so what is kept here is all that is left.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rlhf_operator.untrusted import UnreadableError, clean, loads, shown, text, whole

READ: Final = 16 * 1024
"""Characters of a log that are looked at; the kubelet gives 4 KiB."""
KEPT: Final = 1000
"""Characters of a log that are kept: the last lines of a traceback; a thousand pods a job are in memory."""
ITERATION_MAX: Final = 2**31 - 1
"""Of a report, as in control.proto."""
PATH_MAX: Final = 4096
"""Characters of a path, as Linux takes them."""
METRICS_MAX: Final = 512
"""Metrics of a report; the coordinator has some dozens."""
METRIC_NAME_MAX: Final = 64
"""Characters of a metric's name."""
METRIC_MAX: Final = 1e300
"""Of a metric's value: six digits of it can still be written."""
_ESCAPE: Final = 6
"""Longest escape of JSON, which a cut may fall into."""

_TEXT: Final = re.compile(r'"(message|traceback)": ("(?:[^"\\]|\\.)*")')
"""A text of an object that was cut before it."""


@dataclass(frozen=True, slots=True)
class FinalReport:
    """What a coordinator says last: as its status, which nobody could read after it."""

    iteration: int
    """Iterations trained."""
    checkpoint: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last iteration."""


def readable(log: str) -> str:
    """Return the last lines, in plain words; the very last says why the process ended."""
    # Of a traceback's marks below the line nothing is left without the line's own place.
    lines = [line for entry in log[-READ:].splitlines() for line in _lines(entry) if line.strip(" ^~")]
    shown_log = clean("\n".join(lines))
    if len(shown_log) <= KEPT:
        return shown_log
    _, _, whole_lines = shown_log[-KEPT:].partition("\n")
    return whole_lines or shown_log[-KEPT:]


def last_report(log: str) -> FinalReport | None:
    """Return the coordinator's report, when it came to that; None when the last one has another form."""
    for line in reversed(log[-READ:].splitlines()):
        report = _entry(line).get("report")
        if isinstance(report, dict):
            return _report(report)
    return None


def _report(report: Mapping[str, Any]) -> FinalReport | None:
    try:
        return FinalReport(
            whole(report.get("iteration"), "report.iteration", ITERATION_MAX),
            text(report.get("checkpoint"), "report.checkpoint", PATH_MAX),
            metrics(report.get("metrics")),
        )
    except UnreadableError:
        return None


def metrics(entries: Any) -> dict[str, float]:
    """Return the entries of a map that are finite numbers with names."""
    given = entries.items() if isinstance(entries, Mapping) else ()
    numbers = {clean(name[:METRIC_NAME_MAX]): value for name, value in given if type(value) in (int, float)}
    return {
        name: float(value)
        for name, value in list(numbers.items())[:METRICS_MAX]
        if -METRIC_MAX <= value <= METRIC_MAX  # an integer of 400 digits is no float, and nothing compares to NaN
    }


def _entry(line: str) -> dict[str, Any]:
    entry = loads(line) if line.startswith("{") else None
    return entry if isinstance(entry, dict) else {}


def _lines(line: str) -> Iterator[str]:
    entry = _entry(line)
    if "message" in entry:
        yield from _message_lines(entry)
    elif line.endswith('"}') and not line.startswith("{"):
        texts = {name: loads(escaped) for name, escaped in _TEXT.findall(line)}
        yield from _message_lines(
            {name: decoded for name, decoded in texts.items() if decoded} or {"traceback": _cut(line)}
        )
    elif line.strip():
        yield line.rstrip()


def _message_lines(entry: Mapping[str, Any]) -> Iterator[str]:
    trace = _words(entry.get("traceback")).rstrip().splitlines()
    # It ends with the error, which the message says too, and says better.
    yield from trace[:-1] if "message" in entry else trace
    if "message" in entry:
        yield _words(entry["message"])


def _words(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else shown(value)


def _cut(line: str) -> str:
    """Return what is left of an object that the kubelet cut inside its last text."""
    for skipped in range(_ESCAPE):
        rest = loads(f'"{line[skipped:-1]}')
        if isinstance(rest, str):
            return rest
    return line
