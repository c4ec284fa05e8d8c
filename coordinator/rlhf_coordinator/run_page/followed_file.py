"""Reads a growing file in blocks of whole lines; the reader stores the position of the next block.

A file that was replaced, or ends before the position, is read anew. A line longer than a block comes in parts.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FilePlace:
    """A position in a file: the file's inode, 0 before it was read, and the offset of its first unread byte."""

    file: int = 0
    offset: int = 0


@dataclass(frozen=True)
class FilePiece:
    """Lines that are not empty, and the position of the next ones."""

    lines: tuple[bytes, ...]
    place: FilePlace
    more: bool = False
    """Whether something was read, and the file had more bytes after it."""
    anew: bool = False
    """Whether the file was removed or replaced, or ends before the position, so that earlier lines are invalid."""


def read_piece(path: Path, place: FilePlace, max_bytes: int, newest: int | None = None) -> FilePiece:
    """Return the lines after a position, at most `max_bytes` bytes of them; no lines when the file is absent.

    `newest`: start a file that is read anew this many bytes before its end. Raises OSError.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return FilePiece((), FilePlace(), anew=place.file != 0)
    with file:
        found = os.fstat(file.fileno())
        anew = place.file not in (0, found.st_ino) or place.offset > found.st_size
        start = place.offset if place.file == found.st_ino and not anew else 0
        begun = place.file != found.st_ino or anew
        torn = False
        if begun and newest is not None and found.st_size > newest:
            start, torn = found.st_size - newest, True
        file.seek(start)
        data = file.read(max_bytes)
    end = data.rfind(b"\n") + 1
    if not end and len(data) == max_bytes:  # a line longer than any valid one: passed on in parts
        end = len(data)
    lines = data[:end].split(b"\n")[int(torn) :]
    reached = start + end
    more = end > 0 and reached < found.st_size
    return FilePiece(tuple(line for line in lines if line), FilePlace(found.st_ino, reached), more, anew)
