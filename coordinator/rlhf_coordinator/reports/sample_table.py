"""A row of a sample table, and its line in a file.

Rule: what is in a row comes from models and users, so a line is ASCII without control characters, whatever the texts
hold: it can be shown on any terminal. A text that is too long is cut, and the row says so. A line of a file is
untrusted when it is read back: what is no row is an error that says which line.
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
"""Of the tables, in the run folder."""
FILE: Final = "iteration-{:06d}.jsonl"
"""Of one iteration's table."""
MAX_TEXT_CHARACTERS: Final = 65536
"""Characters of a prompt or a response that are kept: far more than anybody reads, little for a disk."""
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of control and format characters, halves of pairs, what has no meaning, and odd line breaks."""
MAX_LINE_BYTES: Final = 16 * MAX_TEXT_CHARACTERS
"""Of a line that is read back: two whole texts, six bytes for a character, and the numbers."""


@dataclass(frozen=True)
class SampleRow:
    """One sample, as people see it."""

    iteration: int
    sample: int
    """Its index in the batch."""
    group: int
    """Samples of one prompt share it."""
    line: int
    """Of its prompt in the prompt file, from 1."""
    prompt: str
    response: str
    response_tokens: int
    finish_reason: str
    """stop, length, or empty for a sample that failed."""
    reward: float | None
    """Reward as it was given, several combined, before spec.rewardShaping; None: nothing judged it."""
    rewards: Mapping[str, float]
    """Values by name: the reward, each of several rewards, a cost, and numbers that rewards gave beside them."""
    advantage: float | None
    """Mean over the response tokens, as training computed it from the shaped reward; None: not trained on, or without
    one."""
    abstained: bool
    failed: bool
    """No worker could decode it, and the iteration went on without it."""
    workers: tuple[str, ...]
    """That decoded it, in order; empty: not known."""
    weight_versions: tuple[tuple[int, int], ...]
    """(version, tokens) of the response, first tokens first."""
    drafted_tokens: int
    """That were speculated for it and verified, where it ended."""
    accepted_tokens: int
    migrated: bool
    """More than one worker decoded it."""
    cut: bool
    """A text is longer than it is here."""
    shaped_reward: float | None = None
    """Reward after all shaping; None: not trained on."""


_ROWS: Final = TypeAdapter(SampleRow)


def cut_text(text: str) -> str:
    """Return the text, or as much of its beginning as a row keeps."""
    return text[:MAX_TEXT_CHARACTERS]


def visible(text: str) -> str:
    """Return the text with everything that a terminal acts on, or that changes the order or look of what follows,
    written as its escape: only line breaks stay."""
    return "".join(
        letter
        if letter == "\n" or unicodedata.category(letter) not in _HIDDEN
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


def line_of(row: SampleRow) -> str:
    """Return the row as one line of JSON, ASCII alone; a number that JSON lacks is null."""
    values = {field.name: _plain(getattr(row, field.name)) for field in fields(row)}
    # DEL is the one control character that JSON leaves as it is.
    return json.dumps(values, ensure_ascii=True, allow_nan=False).replace("\x7f", "\\u007f")


def read_table(path: Path) -> Iterator[SampleRow]:
    """Yield the rows of a file. Raises OSError, and ValueError that names the line that is no row."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            try:
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"{path} line {number} is longer than {MAX_LINE_BYTES} bytes")
                yield _ROWS.validate_json(line, strict=True)
            except ValidationError as error:
                what = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:3])
                raise ValueError(f"{path} line {number} is no row of a sample table: {what}") from error


def table_files(run_dir: Path) -> dict[int, Path]:
    """Return iteration -> file of every table of a run, in order."""
    found = {}
    for path in (run_dir / FOLDER).glob("iteration-*.jsonl"):
        number = path.stem.removeprefix("iteration-")
        if number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


def best_first(rows: Iterable[SampleRow]) -> list[SampleRow]:
    """Return the rows that have a reward, highest first; equal ones in the order of the batch."""
    judged = [(row.reward, row) for row in rows if row.reward is not None]
    return [row for _, row in sorted(judged, key=lambda pair: (-pair[0], pair[1].iteration, pair[1].sample))]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return value
