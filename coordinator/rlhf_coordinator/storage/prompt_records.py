"""The records of a prompt file in any format: JSON objects, each with its place and its text.

A bad record is an error that names its place; blank lines are skipped.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rlhf_api.job.rollout import Prompts, PromptSource
from rlhf_common.json_document import parse_json
from rlhf_common.nesting import MAX_DEPTH, too_deep
from rlhf_common.surrogates import half_pair
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.prompt_places import Place
from rlhf_coordinator.storage.prompt_tables import PARQUET_MARK, table_rows
from rlhf_coordinator.storage.table_folder import is_table, tables_of

_BLOCK: Final = 1 << 20
"""Bytes of a file to read at once for hashing."""
SHOWN: Final = 80
"""Longest JSON path in an error, in characters."""
_ESCAPE: Final = "\\u"
"""Beginning of every half of a surrogate pair in a line, because the line itself is UTF-8."""
HALF_PAIR_REMEDY: Final = "write the whole character, or its two escapes one after the other"


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One record."""

    number: int
    """Number from 1: the line of a JSONL file, the row of a table or of all tables of a folder."""
    place: Place
    data: dict[str, Any]
    text: str
    """JSON object as text."""


def places(prompts: Prompts) -> list[tuple[PromptSource, Place]]:
    """Return the files of the prompts, in order, and the place of each."""
    field = prompts.field
    return [
        (file, Place(Path(file.path), field=f"{field}.sources[{at}].path" if prompts.sources else f"{field}.path"))
        for at, file in enumerate(prompts.files)
    ]


def read_records(
    prompts: Prompts, file: PromptSource, whole: Place, response_keys: Sequence[str] = ()
) -> Iterator[PromptRecord]:
    """Yield the records of a file of the prompts, whose place is `whole`. Raises JobError naming the first bad one.

    Keys besides the prompt and `response_keys` are included if `prompts.columns` lists them or is empty.
    """
    key = file.prompt_key or prompts.prompt_key
    needed = {key: "prompts.promptKey"}
    needed |= dict.fromkeys(response_keys, "the key of a response in spec.algorithm")
    needed |= {name: "prompts.columns" for name in prompts.columns if name not in needed}
    number = 0
    for place, record, text in _objects(whole, needed, prompts.columns):
        # Lines include blank ones; rows of a folder are numbered across its files.
        number = max(number + 1, place.number)
        if key == prompts.prompt_key:
            yield PromptRecord(number, place, record, text)
            continue
        if prompts.prompt_key in record:
            message = f"has the key {prompts.prompt_key!r} beside {key!r}, which takes that name (prompts.promptKey)"
            raise place.bad(f"{message}; name the columns to read with prompts.columns")
        renamed = {prompts.prompt_key if name == key else name: value for name, value in record.items()}
        yield PromptRecord(number, place, renamed, json.dumps(renamed, ensure_ascii=False))


def _objects(
    whole: Place, needed: Mapping[str, str], columns: Sequence[str]
) -> Iterator[tuple[Place, dict[str, Any], str]]:
    """Yield the place, the object and the text of each record; with `columns` only the needed keys."""
    if whole.path.is_dir() or is_table(whole.path):
        for path in tables_of(whole) if whole.path.is_dir() else [whole.path]:
            for row in table_rows(replace(whole, path=path), needed, all_columns=not columns):
                yield row.place, row.data, row.text
        return
    for place, line in _lines(whole):
        record = _object(place, line)
        for key, field in needed.items():
            if key not in record:
                raise place.bad(f"has no key {key!r} ({field}); it has {', '.join(record) or 'none'}")
        if columns:
            record = {key: record[key] for key in needed}
        if _ESCAPE in line and (half := half_pair(record)) is not None:
            raise place.bad(f"has half a surrogate pair under {half!r}, which is not text; {HALF_PAIR_REMEDY}")
        yield place, record, json.dumps(record, ensure_ascii=False) if columns else line.strip()


def content(whole: Place) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks, or the name and digest of each table of a folder (`tables_of`).

    Raises JobError for a file that cannot be read, and for a folder that `tables_of` refuses.
    """
    if whole.path.is_dir():
        for path in tables_of(whole):
            yield os.fsencode(path.name) + b"\0" + content_digest(replace(whole, path=path))
        return
    try:
        with whole.path.open("rb") as file:
            while block := file.read(_BLOCK):
                yield block
    except OSError as error:
        raise _unreadable(whole, error) from error


def content_digest(whole: Place) -> bytes:
    """Return the SHA-256 of `content`. Raises JobError."""
    digest = hashlib.sha256()
    for block in content(whole):
        digest.update(block)
    return digest.digest()


def _lines(whole: Place) -> Iterator[tuple[Place, str]]:
    try:
        data = whole.path.read_bytes()
    except OSError as error:
        raise _unreadable(whole, error) from error
    if data.startswith(PARQUET_MARK):
        raise whole.bad("is a parquet file by its content; give it a name that ends in .parquet")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = replace(whole, number=data[: error.start].count(b"\n") + 1)
        raise where.bad(f"is not UTF-8: {error.reason}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield replace(whole, number=number), line


def _object(place: Place, line: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise place.bad(f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise place.bad(f"is a JSON {type(record).__name__}, not an object")
    if line.count("[") + line.count("{") > MAX_DEPTH and (deep := too_deep(record)) is not None:
        raise place.bad(f"is nested more than {MAX_DEPTH} levels deep under {deep[:SHOWN]!r}; nothing that is read is")
    return record


def _unreadable(whole: Place, error: OSError) -> JobError:
    return whole.bad(f"cannot be read: {error.strerror or error}")
