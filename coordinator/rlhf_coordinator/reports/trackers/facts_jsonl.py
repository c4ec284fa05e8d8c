"""facts.jsonl: where the time of the last iterations went, one JSON object per line, which `rlhf explain` reads.

Rule: the file is written whole or not at all, and holds the last KEPT iterations alone, so it is never larger than some
megabytes. Lines that cannot be read, and those of another version, are left out by readers.
"""

import logging
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from rlhf_coordinator.reports.trackers.tracker import Tracker
from rlhf_planner.explain.iteration_profile import IterationProfile

log = logging.getLogger(__name__)

FILE: Final = "facts.jsonl"
KEPT: Final = 8
"""Iterations: enough for a mean over several, few enough to be read at once."""
MAX_BYTES: Final = 64 * 1024 * 1024
"""A larger file was not written here, and is not read."""


class FactsJsonl(Tracker):
    """The file."""

    def __init__(self, run_dir: Path, next_iteration: int) -> None:
        """Keep iterations before `next_iteration` only. Raises OSError."""
        self._path = run_dir / FILE
        known = [facts for facts in read_facts(self._path) if facts.iteration < next_iteration]
        self._lines = {facts.iteration: facts.model_dump_json() for facts in known}

    def facts(self, facts: IterationProfile) -> None:
        """Write the iteration with those before it. Raises OSError."""
        self._lines[facts.iteration] = facts.model_dump_json()
        self._lines = dict(sorted(self._lines.items())[-KEPT:])
        partial = self._path.with_name(f".{FILE}.tmp")
        partial.write_text("".join(f"{line}\n" for line in self._lines.values()), encoding="utf-8")
        partial.replace(self._path)


def read_facts(path: Path) -> list[IterationProfile]:
    """Return the iterations of the file, oldest first; what cannot be read is left out. Empty when there is no file.

    Raises OSError when there is one that cannot be opened.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            log.warning("%s is left out: it has more than %d bytes", path, MAX_BYTES)
            return []
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    read = []
    for line in text.splitlines():
        try:
            read.append(IterationProfile.model_validate_json(line))
        except ValidationError:
            continue
    return sorted(read, key=lambda facts: facts.iteration)
