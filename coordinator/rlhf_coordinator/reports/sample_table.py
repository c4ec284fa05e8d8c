"""A row of a sample table, and its line in a file.

A line is ASCII without control characters before its end. A line read from a file is untrusted.
"""

import json
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

FOLDER: Final = "samples"
"""Folder of the tables in the run folder."""
FILE: Final = "iteration-{:06d}.jsonl"
"""File name of one iteration's table."""
MAX_TEXT_CHARACTERS: Final = 65536
"""Longest prompt or response after `cut_text`, in characters."""
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of control, format, private and unassigned characters, surrogates and unusual line breaks."""
ESCAPE_BYTES: Final = 12
"""Bytes of the longest escape of one character in ASCII JSON: two surrogates of six bytes."""
OTHER_BYTES: Final = 512 * 1024
"""Bytes that a line may have beside the prompt and the response."""
MAX_LINE_BYTES: Final = 2 * ESCAPE_BYTES * MAX_TEXT_CHARACTERS + OTHER_BYTES
"""Longest line that is read, in bytes."""


@dataclass(frozen=True)
class SampleRow:
    """One sample, as people see it."""

    iteration: int
    sample: int
    """Index of the sample in its iteration."""
    group: int
    """Number that the samples of one prompt share."""
    line: int
    """Number of its prompt's line or table row, from 1, as in `Prompt.line`."""
    prompt: str
    response: str
    response_tokens: int
    finish_reason: str
    """stop, length, or empty for a failed sample."""
    reward: float | None
    """Reward before shaping; a combination if there are several. None without one."""
    rewards: Mapping[str, float]
    """Values by name: the reward, each of several rewards, a cost, and extra values of rewards."""
    advantage: float | None
    """Mean over the trained tokens, as training reported it; None if unknown."""
    abstained: bool
    failed: bool
    """Whether no worker could decode it, so that the iteration left it out."""
    workers: tuple[str, ...]
    """Workers that decoded it, in order; empty if unknown."""
    weight_versions: tuple[tuple[int, int], ...]
    """(version, tokens) of the response, first tokens first."""
    drafted_tokens: int
    """Draft tokens verified for it on the worker where it ended."""
    accepted_tokens: int
    migrated: bool
    """Whether more than one worker leased it for decoding."""
    cut: bool
    """Whether the stored prompt or response was cut."""
    shaped_reward: float | None = None
    """Reward after shaping, as training reported it; None if unknown."""


_ROWS: Final = TypeAdapter(SampleRow)


def cut_text(text: str) -> str:
    """Return the text, cut to the length that a row stores."""
    return text[:MAX_TEXT_CHARACTERS]


def visible(text: str) -> str:
    """Return the text with escapes for characters that control a terminal or change the order or look of the text.

    Line breaks stay.
    """
    return "".join(
        letter
        if letter == "\n" or unicodedata.category(letter) not in _HIDDEN
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


def line_of(row: SampleRow) -> str:
    """Return the row as one line of ASCII JSON; a number that JSON lacks is null."""
    values = {field.name: _plain(getattr(row, field.name)) for field in fields(row)}
    # JSON leaves DEL, a control character, unchanged.
    return json.dumps(values, ensure_ascii=True, allow_nan=False).replace("\x7f", "\\u007f")


def read_table(path: Path) -> Iterator[SampleRow]:
    """Yield the rows of a file. Raises OSError, and ValueError that names an invalid line."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            try:
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"{path} line {number} is longer than {MAX_LINE_BYTES} bytes")
                yield _ROWS.validate_json(line, strict=True)
            except ValidationError as error:
                errors = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:3])
                raise ValueError(f"{path} line {number} is no row of a sample table: {errors}") from error


def table_files(run_dir: Path) -> dict[int, Path]:
    """Return iteration -> file of every table of a run, in order."""
    found = {}
    for path in (run_dir / FOLDER).glob("iteration-*.jsonl"):
        number = path.stem.removeprefix("iteration-")
        if number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


def best_first(rows: Iterable[SampleRow]) -> list[SampleRow]:
    """Return the rows that have a reward, highest first; equal ones by iteration and sample."""
    judged = [(row.reward, row) for row in rows if row.reward is not None]
    return [row for _, row in sorted(judged, key=lambda pair: (-pair[0], pair[1].iteration, pair[1].sample))]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return value
