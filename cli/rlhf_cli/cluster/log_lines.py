"""Log lines of several pods: their order in time, and their print, each after its worker's name in a colour.

Rule: a JSON line of ours is shown as time, level and message; any other line is shown unchanged.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rich.text import Text

from rlhf_cli.cluster.cluster_job import moment
from rlhf_cli.cluster.cluster_session import ClusterSession
from rlhf_common.json_document import parse_json

COLOURS: Final = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")
_LEVEL_STYLES: Final = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red", "DEBUG": "dim"}


@dataclass(frozen=True)
class LogLine:
    """One line of one pod's log."""

    worker: str
    at: datetime | None
    """Time at which the container runtime received the line; it orders the lines of several pods. None when unknown."""
    text: str


class LogPrinter:
    """Prints log lines, each after its worker's name if there are several."""

    def __init__(self, session: ClusterSession, workers: Iterable[str], *, raw: bool) -> None:
        self._session, self._raw = session, raw
        self._colours: dict[str, str] = {}
        self.add_workers(workers)

    def add_workers(self, workers: Iterable[str]) -> None:
        """Give each new worker a colour."""
        for name in workers:
            self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])

    def print(self, line: LogLine) -> None:
        """Print one line of a known worker."""
        out = self._session.out
        width = max(map(len, self._colours)) if len(self._colours) > 1 else 0
        if self._raw:
            out.file.write(f"{line.worker} {line.text}\n" if width else f"{line.text}\n")
        else:
            out.print(line_text(line, self._colours[line.worker], width), markup=False, soft_wrap=True)
        if self._session.live or self._raw:
            out.file.flush()


def parse_line(worker: str, raw: bytes) -> LogLine:
    """Return one line of a log that was requested with timestamps."""
    text = raw.decode(errors="replace").rstrip("\r\n")
    stamp, _, rest = text.partition(" ")
    at = moment(_microseconds(stamp))
    return LogLine(worker, at, rest if at is not None else text)


def in_order(logs_of_pods: Sequence[Sequence[LogLine]]) -> list[LogLine]:
    """Return the lines of all pods by time; the lines of one pod stay in order."""
    ranked = []
    for pod, lines in enumerate(logs_of_pods):
        latest = float("-inf")
        keyed = []
        for index, line in enumerate(lines):
            latest = max(latest, line.at.timestamp()) if line.at else latest
            keyed.append((latest, pod, index, line))
        ranked.append(keyed)
    return [line for _, _, _, line in heapq.merge(*ranked, key=lambda item: item[:3])]


def line_text(line: LogLine, colour: str, name_width: int) -> Text:
    """Return a line as `generation-0  12:00:01 INFO joined`; `name_width` 0 leaves the name out."""
    prefix = Text(f"{line.worker:<{name_width}}  " if name_width else "", style=colour)
    try:
        entry = parse_json(line.text)
        level, message = str(entry["level"]), str(entry["message"])
    except (ValueError, KeyError, TypeError):
        return prefix.append(line.text, style="default")
    at = moment(entry.get("time"))
    prefix.append(f"{at:%H:%M:%S} " if at else "", style="dim")
    prefix.append(f"{level} ", style=_LEVEL_STYLES.get(level, "dim"))
    prefix.append(message, style="default")
    if trace := entry.get("traceback"):
        prefix.append(f"\n{str(trace).rstrip()}", style="dim")
    return prefix


def _microseconds(stamp: str) -> str:
    """Return an RFC 3339 time with nanoseconds cut to the microseconds that datetime reads."""
    whole, dot, rest = stamp.partition(".")
    if not dot:
        return stamp
    digits = rest.rstrip("Z")
    zone = rest[len(digits) :]
    return f"{whole}.{digits[:6]}{zone}" if digits.isdigit() else stamp
