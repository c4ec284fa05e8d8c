"""Processor time of a process, and of a process with its descendants, sampled from outside while it runs.

Rule: reads only /proc, so that the measured processes are not disturbed. A finished child counts with the time
credited to its parent. If its parent did not wait for it, its time is lost.
"""

import os
import threading
import time
from bisect import bisect_left
from pathlib import Path
from types import TracebackType
from typing import Final, Self

TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")
EVERY_SECONDS: Final = 0.25
"""Seconds between two samples."""


class ProcessorTime:
    """Samples the tree of one process until the block is left."""

    def __init__(self, pid: int) -> None:
        """Start sampling; `pid` is the root, which must be running."""
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._times: list[int] = []
        self._spent: list[float] = []

    def __enter__(self) -> Self:
        self._times.append(time.time_ns())
        self._spent.append(seconds_of_tree(self._pid))
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, begin_ns: int, end_ns: int) -> float:
        """Return the seconds spent between two times, in ns since 1970, interpolated between samples."""
        return self._at(end_ns) - self._at(begin_ns)

    def _at(self, time_ns: int) -> float:
        after = min(bisect_left(self._times, time_ns), len(self._times) - 1)
        before = max(after - 1, 0)
        width = self._times[after] - self._times[before]
        share = min((time_ns - self._times[before]) / width, 1.0) if width else 1.0
        return self._spent[before] + share * (self._spent[after] - self._spent[before])

    def _sample(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            # A process that ends during the sample is missing for a moment, with its children.
            spent = max(seconds_of_tree(self._pid), self._spent[-1])
            self._times.append(time.time_ns())
            self._spent.append(spent)


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


def seconds_of_tree(pid: int) -> float:
    """Return the processor time so far of a process, its finished children and the trees of running ones."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it ended during the sample
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS_A_SECOND + sum(map(seconds_of_tree, children))
