"""The last iterations of a job, from the lines that its coordinator logs. Pure.

Rule: a line that is not understood is passed over: a log is written for people. Times are those of the coordinator's
clock and only their differences are shown.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from rlhf_cli.cluster.stored import moment

LINES: Final = 400
"""Log lines that are asked for: five an iteration, and some to spare."""
_CLOSED: Final = re.compile(r"iteration (\d+)/(\d+): reward (\S+), ([\d.]+) samples/s, ([\d.]+) s")
_ENTERED: Final = re.compile(r"([A-Z][a-z]+) \(iteration (\d+)\)")


@dataclass
class Iteration:
    """One iteration that is over, or the one under way."""

    number: int
    """From 1."""
    reward: float | None = None
    samples_per_second: float | None = None
    seconds: float | None = None
    """None while it is under way."""
    stages: dict[str, float] = field(default_factory=dict)
    """Stage -> seconds, in the order in which they were entered."""


def iterations(lines: Iterable[str]) -> list[Iteration]:
    """In order; one whose beginning the lines do not hold has no stages."""
    found: dict[int, Iteration] = {}
    stage: tuple[str, int, datetime] | None = None
    for line in lines:
        at, message = _entry(line)
        if match := _CLOSED.fullmatch(message):
            _left(found, stage, at)
            stage = None
            _close(found, match)
        elif (match := _ENTERED.fullmatch(message)) and at is not None:
            _left(found, stage, at)
            stage = (match.group(1), int(match.group(2)) + 1, at)
            found.setdefault(stage[1], Iteration(stage[1]))
    return [found[number] for number in sorted(found)]


def as_metrics(past: Iterable[Iteration]) -> list[dict[str, Any]]:
    """Finished iterations as the live view takes them."""
    return [
        {"iteration": each.number - 1, "reward": each.reward, "samples_per_second": each.samples_per_second}
        for each in past
        if each.seconds is not None
    ]


def _left(found: Mapping[int, Iteration], stage: tuple[str, int, datetime] | None, at: datetime | None) -> None:
    if stage is not None and at is not None:
        name, number, since = stage
        stages = found[number].stages
        stages[name] = stages.get(name, 0.0) + max(0.0, (at - since).total_seconds())


def _close(found: dict[int, Iteration], match: re.Match[str]) -> None:
    number = int(match.group(1))
    closed = found.setdefault(number, Iteration(number))
    reward = match.group(3)
    closed.reward = None if reward in ("none", "nan") else float(reward)
    closed.samples_per_second, closed.seconds = float(match.group(4)), float(match.group(5))


def _entry(line: str) -> tuple[datetime | None, str]:
    """(time, message) of a line, which is one JSON object in a pod."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None, ""
    if not isinstance(entry, dict):
        return None, ""
    return moment(entry.get("time")), str(entry.get("message") or "")
