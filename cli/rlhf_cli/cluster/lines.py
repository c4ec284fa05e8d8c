"""Log lines of several pods, told apart by a coloured worker's name. Pure.

Rule: a line of ours is one JSON object and is shown as time, level, message; any other line is shown as it is. Nothing
is left out.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rich.text import Text

from rlhf_cli.cluster.stored import moment

COLOURS: Final = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta")
_LEVELS: Final = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red", "DEBUG": "dim"}


@dataclass(frozen=True)
class Line:
    """One line of one pod's log."""

    worker: str
    at: datetime | None
    """When the container runtime took it, which orders lines of several pods."""
    text: str


def split(worker: str, raw: bytes) -> Line:
    """From a stream that was asked for with timestamps."""
    text = raw.decode(errors="replace").rstrip("\r\n")
    stamp, _, rest = text.partition(" ")
    at = moment(_microseconds(stamp))
    return Line(worker, at, rest if at is not None else text)


def show(line: Line, colour: str, name_width: int) -> Text:
    """`generation-0  12:00:01 INFO joined`."""
    prefix = Text(f"{line.worker:<{name_width}}  " if name_width else "", style=colour)
    try:
        entry = json.loads(line.text)
        level, message = str(entry["level"]), str(entry["message"])
    except (ValueError, KeyError, TypeError):
        return prefix.append(line.text, style="default")
    at = moment(entry.get("time"))
    prefix.append(f"{at:%H:%M:%S} " if at else "", style="dim")
    prefix.append(f"{level} ", style=_LEVELS.get(level, "dim"))
    prefix.append(message, style="default")
    if trace := entry.get("traceback"):
        prefix.append(f"\n{str(trace).rstrip()}", style="dim")
    return prefix


def _microseconds(stamp: str) -> str:
    """RFC 3339 with nanoseconds, cut to what datetime reads."""
    whole, dot, rest = stamp.partition(".")
    if not dot:
        return stamp
    digits = rest.rstrip("Z")
    zone = rest[len(digits) :]
    return f"{whole}.{digits[:6]}{zone}" if digits.isdigit() else stamp
