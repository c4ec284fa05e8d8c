"""timeline.json: the work of workers over time, as Chrome trace events (chrome://tracing, ui.perfetto.dev).

The file is a JSON array, one event per line, without its closing bracket until the run ends. Past MAX_BYTES the file is
renamed to timeline-previous.json.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlhf_common import control_pb2 as pb
from rlhf_common.json_document import parse_json
from rlhf_common.names import Group
from rlhf_coordinator.reports.trackers.tracker import Tracker

FILE: Final = "timeline.json"
PREVIOUS: Final = "timeline-previous.json"
MAX_BYTES: Final = 256 * 1024 * 1024
"""Size of the file in bytes above which a new one begins."""
FLUSH_SECONDS: Final = 1.0
"""Least seconds between two flushes for spans."""
_OPENING: Final = b"[\n"
_CLOSING: Final = b'{"ph":"M","pid":0,"name":"process_labels","args":{"labels":"end"}}\n]\n'
_GROUPS: Final = {group.value: number for number, group in enumerate(Group)}


@dataclass(frozen=True)
class TimelineSpan:
    """A span read from the file."""

    worker: str
    name: str
    start: float
    """Begin in seconds since the Unix epoch."""
    seconds: float
    iteration: int
    destination: str = ""
    """Destination worker of a migrated sample."""


class TimelineJson(Tracker):
    """The timeline of a run folder. A live reader sees spans with the next flush: by a later span or an iteration."""

    def __init__(self, run_dir: Path, next_iteration: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the file. `next_iteration` has no effect. Raises OSError."""
        self._file = TimelineFile(run_dir / FILE)
        self._clock = clock
        self._flushed = 0.0

    def iteration(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Flush the written events; the metrics are not written. Raises OSError."""
        self._flush()

    def span(self, span: pb.Span) -> None:
        """Write a span. Raises OSError."""
        self._file.span(span.worker, span.name, span.start_ns, span.end_ns, span.iteration, dict(span.attributes))
        if self._clock() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def event(self, time_ns: int, kind: str, message: str, attributes: Mapping[str, str]) -> None:
        """Write an event across all rows. Raises OSError."""
        self._file.instant(time_ns, kind, {"message": message, **attributes})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Complete the file. Raises OSError."""
        self._file.close()

    def _flush(self) -> None:
        self._flushed = self._clock()
        self._file.flush()


class TimelineFile:
    """The file, open for appending; `flush` makes written events visible to readers. Methods raise OSError."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._named: set[str] = set()
        _mend(path)
        self._file = path.open("ab")

    def span(
        self, worker: str, name: str, start_ns: int, end_ns: int, iteration: int, attributes: Mapping[str, str]
    ) -> None:
        """Write a span."""
        self._write(
            {
                "ph": "X",
                "name": name,
                "cat": name.partition("/")[0],
                **self._row(worker),
                "ts": start_ns / 1000,
                "dur": max(0, end_ns - start_ns) / 1000,
                "args": {"iteration": iteration, **attributes},
            }
        )

    def instant(self, time_ns: int, name: str, attributes: Mapping[str, Any]) -> None:
        """Write an instant event, drawn across all rows."""
        coordinator = self._row(Group.COORDINATOR.value)
        event = {"ph": "i", "s": "g", "name": name, **coordinator, "ts": time_ns / 1000, "args": dict(attributes)}
        self._write(event)

    def flush(self) -> None:
        """Make written events visible; begin a new file when this one is full."""
        self._file.flush()
        if self._file.tell() > self._max_bytes:
            self.close()
            self._path.replace(self._path.with_name(PREVIOUS))
            self._named.clear()
            _mend(self._path)
            self._file = self._path.open("ab")

    def close(self) -> None:
        """Complete the file, which is plain JSON from now on."""
        self._file.write(_CLOSING)
        self._file.close()

    def _row(self, worker: str) -> dict[str, int]:
        group, _, index = worker.rpartition("-") if "-" in worker else (worker, "", "0")
        row = {"pid": _GROUPS.get(group, len(_GROUPS)), "tid": int(index) if index.isdigit() else 0}
        if worker not in self._named:
            self._named.add(worker)
            for kind, label in (("process_name", group), ("thread_name", worker)):
                self._write({"ph": "M", "name": kind, **row, "args": {"name": label}})
            self._write({"ph": "M", "name": "process_sort_index", **row, "args": {"sort_index": row["pid"]}})
        return row

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event, separators=(",", ":")).encode() + b",\n")


def _mend(path: Path) -> None:
    """Prepare a file for appending: create it, or remove the end of the array or a torn last line."""
    if not path.exists() or path.stat().st_size < len(_OPENING):
        path.write_bytes(_OPENING)
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 65536))
        tail = file.read()
        if tail.endswith(_CLOSING):
            file.truncate(size - len(_CLOSING))
        else:
            file.truncate(size - (len(tail) - tail.rfind(b"\n") - 1))


def read_spans(path: Path) -> Iterator[TimelineSpan]:
    """Yield the spans of a timeline file, complete or not, in their order; skip lines that are no JSON.

    Raises OSError.
    """
    rows: dict[tuple[int, int], str] = {}
    with path.open("rb") as file:
        for line in file:
            try:
                event = parse_json(line.rstrip(b",\n"))
            except ValueError:  # no JSON, or no UTF-8: the file was damaged
                continue
            if not isinstance(event, dict):
                continue
            if event.get("name") == "thread_name":
                rows[event["pid"], event["tid"]] = event["args"]["name"]
            elif event.get("ph") == "X":
                yield TimelineSpan(
                    worker=rows.get((event["pid"], event["tid"]), f"{event['pid']}-{event['tid']}"),
                    name=event["name"],
                    start=event["ts"] / 1e6,
                    seconds=event["dur"] / 1e6,
                    iteration=int(event["args"].get("iteration", 0)),
                    destination="" if "not_moved" in event["args"] else event["args"].get("destination", ""),
                )
