"""A file that grows, read in pieces of whole lines: which piece comes next is the reader's to keep.

Rule: nothing is held between two pieces, so any number of readers cost no memory. A file that was replaced or cut is
begun anew, and the piece says so. A line that is longer than any that is written is passed over.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FilePlace:
    """How far a file was read: which file it was, and the first byte that was not."""

    file: int = 0
    offset: int = 0


@dataclass(frozen=True)
class FilePiece:
    """Whole lines, and where the next ones begin."""

    lines: tuple[bytes, ...]
    place: FilePlace
    more: bool = False
    """There is more to read at once."""
    anew: bool = False
    """It is another file than that of the place, or a shorter one: what was read of it does not count any more."""


def read_piece(path: Path, place: FilePlace, max_bytes: int, newest: int | None = None) -> FilePiece:
    """Return the lines after a place, at most so many bytes of them. `newest`: of a file that is read from its
    beginning, only so many last bytes. Raises OSError; a file that is not there has no lines."""
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
    if not end and len(data) == max_bytes:  # a line that nobody writes: passed over, piece by piece
        end = len(data)
    lines = data[:end].split(b"\n")[int(torn) :]
    reached = start + end
    more = end > 0 and reached < found.st_size
    return FilePiece(tuple(line for line in lines if line), FilePlace(found.st_ino, reached), more, anew)
