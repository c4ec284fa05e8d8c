"""Writing to a terminal or a pipe: the two consoles, aligned columns, and numbers as people read them.

Rule: a pipe gets no colour.
"""

import sys
from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

PIPE_WIDTH: Final = 160
"""Columns of an output of unknown width (a pipe, a file)."""
COLUMN_GAP: Final = 3
"""Blanks between two columns."""
_MIN_LAST_COLUMN: Final = 24
"""Least width at which the last column stands next to the others, in characters; a narrower one goes below its row."""
_BELOW_INDENT: Final = 4
"""Additional indentation of a cell below its row, in blanks."""

Cell = str | Text


def output() -> Console:
    """Return a console for standard output."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def errors() -> Console:
    """Return a console for standard error."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else PIPE_WIDTH)


def duration(seconds: float) -> str:
    """Return a time in seconds as `42s`, `3m 07s`, `5h 12m` or `2d 03h`."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def size(count: float) -> str:
    """Return a number of bytes as `512 B`, `3.4 MiB` or `17 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def columns(rows: Sequence[Sequence[Cell]], width: int | None, *, wrap: bool = False, indent: int = 0) -> list[Text]:
    """Return `rows`, the first of which is the heading, as lines of aligned columns, cut at `width` characters (None:
    no limit).

    With `wrap` the last column is wrapped instead, below its row where space is short. Columns after the first are left
    out if only the heading has a value.
    """
    texts = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    used = [index for index in range(len(texts[0])) if index == 0 or any(row[index].plain for row in texts[1:])]
    texts = [[row[index] for index in used] for row in texts]
    widths = [max(cell_len(row[index].plain) for row in texts) for index in range(len(used))]
    start = indent + sum(widths[:-1]) + COLUMN_GAP * (len(used) - 1)
    lines = []
    for number, row in enumerate(texts):
        line = Text(" " * indent)
        for cell, cell_width in zip(row[:-1], widths, strict=False):
            line.append_text(cell)
            line.append(" " * (cell_width - cell_len(cell.plain) + COLUMN_GAP))
        last = row[-1]
        if width is not None and wrap and width - start < min(_MIN_LAST_COLUMN, widths[-1]):
            line.rstrip()
            line.truncate(width, overflow="ellipsis")
            lines.append(line)
            if number and last.plain:
                below = indent + _BELOW_INDENT
                lines += _wrapped(Text(" " * below), last, below, width - below)
        elif width is not None and wrap:
            lines += _wrapped(line, last, start, width - start)
        else:
            line.append_text(last)
            lines.append(line)
        if number == 0:
            lines[0].stylize("dim")
    for line in lines:
        line.rstrip()
        if width is not None and not wrap:
            line.truncate(width, overflow="ellipsis")
    return lines


def paragraph(text: Text, width: int | None, indent: int = 0) -> list[Text]:
    """Wrap a text at `width` characters, or at _MIN_LAST_COLUMN if that is more; None returns one line."""
    return _wrapped(Text(" " * indent), text, indent, max(_MIN_LAST_COLUMN, width - indent)) if width else [text]


def _wrapped(line: Text, last: Text, start: int, width: int) -> list[Text]:
    """Return `line` continued by `last`, whose further lines begin at column `start`."""
    # The console measures here; it writes nothing.
    pieces = last.wrap(Console(width=width), width) or [Text()]
    lines = [line.append_text(pieces[0])]
    lines += [Text(" " * start).append_text(piece) for piece in pieces[1:]]
    for wrapped in lines:
        wrapped.rstrip()
    return lines
