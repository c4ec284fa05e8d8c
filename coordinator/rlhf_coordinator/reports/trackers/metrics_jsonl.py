"""metrics.jsonl: one JSON object per iteration, and finally the last version's evaluation.

A line is appended and flushed at once. A new process drops torn lines, and lines of iterations that will be repeated.
NaN and infinity become null.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlhf_common.json_document import parse_json
from rlhf_coordinator.reports.trackers.tracker import Tracker

FILE: Final = "metrics.jsonl"

EVALUATION: Final = "evaluation/"
"""Prefix of the names of evaluation metrics."""

MetricsLine = dict[str, Any]


def read_metrics(path: Path) -> list[MetricsLine]:
    """Return the valid lines of the file with an iteration, in order; empty when there is no file. Raises OSError."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            entry = parse_json(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "iteration" in entry:
            lines.append(entry)
    return lines


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Return whether a line contains only an evaluation: that of the last version, with which no iteration begins."""
    names = line.keys() - {"iteration", "time_ns"}
    return bool(names) and all(name.startswith(EVALUATION) for name in names)


class MetricsJsonl(Tracker):
    """The file, open for appending."""

    def __init__(self, run_dir: Path, next_iteration: int) -> None:
        """Drop invalid lines, and those from `next_iteration` on; open the file. Raises OSError."""
        path = run_dir / FILE
        remaining = [line for line in read_metrics(path) if line["iteration"] < next_iteration]
        partial = path.with_suffix(".tmp")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in remaining)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        self._last = max((line["iteration"] for line in remaining), default=-1)
        self._file = path.open("a", encoding="utf-8")

    def iteration(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Append one line, unless it is of no later iteration than the last one. Raises OSError (disk full)."""
        if iteration > self._last:
            self._write(iteration, time_ns, metrics)
            self._last = iteration

    def evaluation(self, version: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Append one line. Raises OSError (disk full)."""
        self._write(version, time_ns, metrics)

    def _write(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"iteration": iteration, "time_ns": time_ns, **numbers}) + "\n")
        self._file.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file. Raises OSError."""
        self._file.close()
