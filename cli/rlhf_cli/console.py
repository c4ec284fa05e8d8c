"""Where the command line writes, and how numbers look there. Colour and width only on a terminal."""

import sys
from typing import Final

from rich.console import Console

WIDE: Final = 160
"""Columns where nobody said how wide the output is (a pipe, a file)."""


def output() -> Console:
    """Standard output."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)


def errors() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else WIDE)


def duration(seconds: float) -> str:
    """`42s`, `3m 07s`, `5h 12m`, `2d 03h`."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def size(count: float) -> str:
    """Bytes as `512 B`, `3.4 MiB`, `17 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
