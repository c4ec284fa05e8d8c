"""facts.jsonl: the time profile of the last iterations, at most KEPT, one JSON object per line, for `rlhf explain`.

The file is replaced as a whole.
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
"""Most stored iterations."""
MAX_BYTES: Final = 64 * 1024 * 1024
"""Largest file to read, in bytes."""


class FactsJsonl(Tracker):
    """The file."""

    def __init__(self, run_dir: Path, next_iteration: int) -> None:
        """Read the file; the next write leaves out its iterations from `next_iteration` on. Raises OSError."""
        self._path = run_dir / FILE
        earlier = [facts for facts in read_facts(self._path) if facts.iteration < next_iteration]
        self._lines = {facts.iteration: facts.model_dump_json() for facts in earlier}

    def facts(self, facts: IterationProfile) -> None:
        """Write the iteration together with the stored ones. Raises OSError."""
        self._lines[facts.iteration] = facts.model_dump_json()
        self._lines = dict(sorted(self._lines.items())[-KEPT:])
        partial = self._path.with_name(f".{FILE}.tmp")
        partial.write_text("".join(f"{line}\n" for line in self._lines.values()), encoding="utf-8")
        partial.replace(self._path)


def read_facts(path: Path) -> list[IterationProfile]:
    """Return the iterations of the file, oldest first, without invalid lines; empty when it is absent or too large.

    Raises OSError when the file cannot be read.
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
