"""Parses the end of a container's log, which the kubelet stores in the pod's status: readable lines and the last
report.

Rule: pure.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rlhf_operator.untrusted import UnreadableError, clean, loads, shown, text, whole

READ: Final = 16 * 1024
"""Most characters of a log that are read."""
KEPT: Final = 1000
"""Most characters of a log that are stored."""
ITERATION_MAX: Final = 2**31 - 1
"""Largest iteration of a report, as in control.proto."""
PATH_MAX: Final = 4096
"""Maximum characters of a path, as in Linux."""
METRICS_MAX: Final = 512
"""Most metrics of a report that are read."""
METRIC_NAME_MAX: Final = 64
"""Most characters of a metric's name."""
METRIC_MAX: Final = 1e300
"""Largest absolute value of a metric."""
_ESCAPE: Final = 6
"""Length of the longest JSON escape, which a cut may split."""

_TEXT: Final = re.compile(r'"(message|traceback)": ("(?:[^"\\]|\\.)*")')
"""A text in an object that was cut before it."""


@dataclass(frozen=True, slots=True)
class FinalReport:
    """A coordinator's final report."""

    iteration: int
    """Iterations trained."""
    checkpoint: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Its metrics by name."""


def readable(log: str) -> str:
    """Return the last lines as plain text, of at most KEPT characters."""
    # Marks below a line of a traceback are useless without its position.
    lines = [line for entry in log[-READ:].splitlines() for line in _lines(entry) if line.strip(" ^~")]
    shown_log = clean("\n".join(lines))
    if len(shown_log) <= KEPT:
        return shown_log
    _, _, whole_lines = shown_log[-KEPT:].partition("\n")
    return whole_lines or shown_log[-KEPT:]


def last_report(log: str) -> FinalReport | None:
    """Return the coordinator's last report; None if there is none or it is malformed."""
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
    """Return the entries of a map that are finite numbers, at most METRICS_MAX, with shortened names."""
    items = entries.items() if isinstance(entries, Mapping) else ()
    numbers = {clean(name[:METRIC_NAME_MAX]): value for name, value in items if type(value) in (int, float)}
    return {
        name: float(value)
        for name, value in list(numbers.items())[:METRICS_MAX]
        if -METRIC_MAX <= value <= METRIC_MAX  # an integer of 400 digits is no float, and no comparison with NaN holds
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
    # The last line of the traceback is the error, which the message describes.
    yield from trace[:-1] if "message" in entry else trace
    if "message" in entry:
        yield _words(entry["message"])


def _words(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else shown(value)


def _cut(line: str) -> str:
    """Return the rest of an object that the kubelet cut inside its last text."""
    for skipped in range(_ESCAPE):
        rest = loads(f'"{line[skipped:-1]}')
        if isinstance(rest, str):
            return rest
    return line
