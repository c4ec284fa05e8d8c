"""Aligned columns, as kubectl prints them: whole lines in a pipe, cut or wrapped to the width of a terminal. Pure."""

from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

GAP: Final = 3
"""Blanks between columns."""
_LAST_LEAST: Final = 24
"""Columns that the last cell needs beside the others; with less it stands below them."""
_BELOW: Final = 4
"""Further in than the row it belongs to."""

Cell = str | Text


def columns(rows: Sequence[Sequence[Cell]], width: int | None, *, wrap: bool = False, indent: int = 0) -> list[Text]:
    """Lines of `rows`, the first of which is the heading; at most `width` wide, for None as wide as need be.

    What is too wide is cut, or with `wrap` the last column goes on below itself, or below the row where there is no
    room beside it. Columns without a value are left out.
    """
    texts = [[each if isinstance(each, Text) else Text(each) for each in row] for row in rows]
    used = [at for at in range(len(texts[0])) if at == 0 or any(row[at].plain for row in texts[1:])]
    texts = [[row[at] for at in used] for row in texts]
    widths = [max(cell_len(row[at].plain) for row in texts) for at in range(len(used))]
    start = indent + sum(widths[:-1]) + GAP * (len(used) - 1)
    lines = []
    for number, row in enumerate(texts):
        line = Text(" " * indent)
        for cell, size in zip(row[:-1], widths, strict=False):
            line.append_text(cell)
            line.append(" " * (size - cell_len(cell.plain) + GAP))
        last = row[-1]
        if width is not None and wrap and width - start < min(_LAST_LEAST, widths[-1]):
            line.rstrip()
            line.truncate(width, overflow="ellipsis")
            lines.append(line)
            if number and last.plain:
                lines += _wrapped(Text(" " * (indent + _BELOW)), last, indent + _BELOW, width - indent - _BELOW)
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
    """A sentence, wrapped to a terminal."""
    return _wrapped(Text(" " * indent), text, indent, max(_LAST_LEAST, width - indent)) if width else [text]


def _wrapped(line: Text, last: Text, start: int, width: int) -> list[Text]:
    # The console only measures; nothing is written to it.
    pieces = last.wrap(Console(width=width), width) or [Text()]
    found = [line.append_text(pieces[0])]
    found += [Text(" " * start).append_text(piece) for piece in pieces[1:]]
    for each in found:
        each.rstrip()
    return found
