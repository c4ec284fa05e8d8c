"""The data for the page of a run, from the files of its folder, in deltas, each from the end of the previous one.

Its cursor contains its end, so the reader has no state.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rlhf_common.json_document import parse_json
from rlhf_coordinator.reports.sample_table import read_table, table_files
from rlhf_coordinator.reports.trackers import facts_jsonl, histories_jsonl, metrics_jsonl, timeline_json
from rlhf_coordinator.run_page.followed_file import FilePiece, FilePlace, read_piece
from rlhf_coordinator.run_page.run_lines import histories_of, iteration_of, row_of, timeline_event
from rlhf_planner.explain.ranking import SHOWN, comparable, explain, headline

MAX_BYTES: Final = 1024 * 1024
"""Most bytes of the timeline, and of the metrics, in one delta."""
MAX_LINE_BYTES: Final = 8 * 1024 * 1024
"""Most bytes of sample histories in one delta, and the longest line of one iteration."""
NEWEST_BYTES: Final = 32 * 1024 * 1024
"""Part of a long followed file that is read at first, in bytes before its end."""
MAX_TABLES: Final = 16
"""Most sample tables in a delta, the newest."""
MAX_ROWS: Final = 512
"""Most rows of one table."""
FILES: Final = ("timeline", "metrics", "histories")


class RunReader:
    """Reads one run folder; `newest_bytes` replaces NEWEST_BYTES."""

    def __init__(self, run_dir: Path, newest_bytes: int = NEWEST_BYTES) -> None:
        self._run_dir, self._newest_bytes = run_dir, newest_bytes

    def delta(self, cursor: str = "") -> dict[str, Any]:
        """Return the new content since a cursor; "" is the beginning. Raises OSError."""
        places, seen = _read_cursor(cursor)
        timeline = self._piece(timeline_json.FILE, places["timeline"], MAX_BYTES)
        metrics = self._piece(metrics_jsonl.FILE, places["metrics"], MAX_BYTES)
        histories = self._piece(histories_jsonl.FILE, places["histories"], MAX_LINE_BYTES)
        pieces = {"timeline": timeline, "metrics": metrics, "histories": histories}
        stamps = {"facts": self._stamp(facts_jsonl.FILE), "tables": self._stamp("samples")}
        delta: dict[str, Any] = {"spans": [], "marks": []}
        for event in map(timeline_event, timeline.lines):
            if event is not None:
                delta[event[0]].append(event[1])
        delta["iterations"] = [entry for line in metrics.lines if (entry := iteration_of(line)) is not None]
        delta["histories"] = [entry for line in histories.lines if (entry := histories_of(line)) is not None]
        if stamps["tables"] != seen["tables"]:
            delta["tables"] = self._tables()
        if stamps["facts"] != seen["facts"]:
            delta["losses"] = self._losses()
        positions = {name: [piece.place.file, piece.place.offset] for name, piece in pieces.items()}
        return {
            **delta,
            "run": self._run(),
            "more": any(piece.more for piece in pieces.values()),
            "cursor": json.dumps({**positions, **stamps}),
        }

    def deltas(self) -> Iterator[dict[str, Any]]:
        """Yield the current content from the beginning, of a long file its end. Raises OSError."""
        cursor, more = "", True
        while more:
            delta = self.delta(cursor)
            cursor, more = delta["cursor"], delta["more"]
            yield delta

    def _piece(self, name: str, place: FilePlace, max_bytes: int) -> FilePiece:
        return read_piece(self._run_dir / name, place, max_bytes, self._newest_bytes)

    def _stamp(self, name: str) -> int:
        try:
            return (self._run_dir / name).stat().st_mtime_ns
        except OSError:
            return 0

    def _tables(self) -> list[dict[str, Any]]:
        tables = []
        for iteration, path in list(table_files(self._run_dir).items())[-MAX_TABLES:]:
            rows = []
            try:
                for row in read_table(path):
                    rows.append(row_of(row))
                    if len(rows) >= MAX_ROWS:
                        break
            except (OSError, ValueError):  # the readable part is shown
                pass
            tables.append({"iteration": iteration, "rows": rows})
        return tables

    def _losses(self) -> dict[str, Any]:
        facts = facts_jsonl.read_facts(self._run_dir / facts_jsonl.FILE)
        if not comparable(facts):
            return {"headline": "", "words": []}
        return {
            "headline": headline(facts),
            "words": [f"{explanation.cause}: {explanation.words}" for explanation in explain(facts)[:SHOWN]],
        }

    def _run(self) -> dict[str, Any]:
        job, summary = self._document("job.json"), self._document("summary.json")
        metadata, spec = job.get("metadata"), job.get("spec")
        algorithm = spec.get("algorithm") if isinstance(spec, dict) else None
        return {
            "name": str(metadata.get("name", ""))[:200] if isinstance(metadata, dict) else "",
            "folder": self._run_dir.name,
            "algorithm": next(iter(algorithm), "")[:200] if isinstance(algorithm, dict) else "",
            "iterations": spec.get("iterations") if isinstance(spec, dict) else None,
            "phase": "" if self._goes_on() else str(summary.get("phase", ""))[:200],
        }

    def _goes_on(self) -> bool:
        """Return whether metrics.jsonl is newer than the summary."""
        return self._stamp("metrics.jsonl") > self._stamp("summary.json")

    def _document(self, name: str) -> dict[str, Any]:
        try:
            value = parse_json((self._run_dir / name).read_bytes())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


def _read_cursor(cursor: str) -> tuple[dict[str, FilePlace], dict[str, int]]:
    """Return the position in each followed file, and the modification times of the others, from a cursor.

    An invalid cursor gives the beginning, and times of -1.
    """
    try:
        parsed = parse_json(cursor) if cursor else {}
        places = {name: FilePlace(*map(_count, parsed[name])) for name in FILES}
        return places, {name: _count(parsed[name]) for name in ("facts", "tables")}
    except (ValueError, TypeError, KeyError):
        return dict.fromkeys(FILES, FilePlace()), {"facts": -1, "tables": -1}


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError("no count")
    return value
