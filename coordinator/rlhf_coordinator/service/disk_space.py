"""The free space on the file systems of a job, for Prometheus.

A scrape waits at most WAIT_SECONDS for the answers. Without an answer of the last KEPT_SECONDS there is no number.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Final, NamedTuple

KEPT_SECONDS: Final = 10.0
"""Seconds for which an answer is cached."""
WAIT_SECONDS: Final = 1.0
"""Most seconds that a scrape waits for the answers of all folders."""


class Space(NamedTuple):
    """Bytes of a file system."""

    free: int
    """Bytes available to users without privileges."""
    size: int


def space_of(folder: Path) -> Space | None:
    """Return the space of the file system of a folder, or of its nearest existing parent; None when the query fails."""
    for place in (folder, *folder.parents):
        try:
            found = os.statvfs(place)
        except FileNotFoundError:
            continue  # the first checkpoint creates its folder
        except OSError:
            return None
        return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
    return None


class DiskSpace:
    """The space of some folders, by name."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        ask: Callable[[Path], Space | None] = space_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folders, self._ask, self._clock = dict(folders), ask, clock
        self._lock = threading.Lock()
        self._asking: dict[str, Future[None]] = {}
        self._answers: dict[str, tuple[float, Space | None]] = {}
        """Folder -> (time of the answer, the answer)."""

    def read(self) -> dict[str, Space]:
        """Return the space of every folder with an answer of the last KEPT_SECONDS; wait for new answers if needed."""
        with self._lock:
            asked = [self._asked(name) for name in self._folders]
        wait([query for query in asked if query is not None], WAIT_SECONDS)
        now = self._clock()
        answers = [(name, *self._answers[name]) for name in self._folders if name in self._answers]
        return {name: space for name, at, space in answers if space is not None and now - at <= KEPT_SECONDS}

    def _asked(self, name: str) -> Future[None] | None:
        """Return the query of a folder in progress, or a new one; None when the last answer is still valid."""
        query = self._asking.get(name)
        if query is not None and not query.done():
            return query
        answer = self._answers.get(name)
        if answer is not None and self._clock() - answer[0] < KEPT_SECONDS:
            return None
        query = self._asking[name] = Future()
        # A daemon: a query that hangs must not keep the process from ending.
        threading.Thread(target=self._answer, args=(name, query), name="disk", daemon=True).start()
        return query

    def _answer(self, name: str, query: Future[None]) -> None:
        try:
            space = self._ask(self._folders[name])
            self._answers[name] = (self._clock(), space)
        finally:
            query.set_result(None)
