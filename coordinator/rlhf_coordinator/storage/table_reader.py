"""A separate process that reads a table with pyarrow and writes its rows to stdout (`prompt_tables`).

  python -m rlhf_coordinator.storage.table_reader REQUEST
  REQUEST: a JSON object, the fields of `TableRequest`
  R<JSON object of a row>            one line per row, in order
  E<JSON: [row or 0, error]>         the last line, or
  Z<number of rows>

Must never import anything of the project.
"""

import json
import resource
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

LARGEST_ROW: Final = 16 << 20
"""Largest row in bytes."""
MOST_ROWS: Final = 1 << 24
"""Most rows of a table."""
_STREAM_END: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""End mark of an Arrow stream; a stream without it is refused."""
ARROW_MARK: Final = b"ARROW1"
"""First bytes of a file in Arrow's random access format; a stream lacks them."""
DEEPEST: Final = 16
"""Deepest nesting of lists and structs."""
MEMORY: Final = 8 << 30
"""Most bytes of the process's address space."""
_PART: Final = 64
"""Most rows to convert at once."""
_BUFFER: Final = 1 << 20
"""Buffer size of the parquet reader in bytes."""


@dataclass(frozen=True)
class TableRequest:
    """The file and the columns to read."""

    path: str
    needed: Mapping[str, str]
    """Required columns -> the field of the manifest that requires each."""
    all_columns: bool
    """Whether other columns are read, too."""


class BadTableError(Exception):
    """Error of a row, from 1, or of the file (0); the text continues the sentence after its name."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(row, problem)
        self.row, self.problem = row, problem


def rows(request: TableRequest) -> Iterator[str]:
    """Yield the rows of a parquet or Arrow file as JSON objects. Raises BadTableError."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise BadTableError(0, "is a table, which needs pyarrow: pip install 'rlhf-operator[data]'") from error
    try:
        parts = _arrow_parts(request) if request.path.endswith(".arrow") else _parquet_parts(request)
        start = 1
        for part in parts:
            yield from _rows_of(part, part.schema.names, start)
            start += part.num_rows
            if start > MOST_ROWS + 1:
                raise BadTableError(0, f"has more than {MOST_ROWS} rows: give a part of it")
    except OSError as error:  # also for a truncated file
        raise BadTableError(0, f"cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise BadTableError(0, f"cannot be read with {MEMORY} bytes of memory") from error
    except (pyarrow.ArrowException, ValueError) as error:
        raise BadTableError(0, f"cannot be read as a table: {error}") from error


def _parquet_parts(request: TableRequest) -> Iterator[Any]:
    """Yield the wanted columns, a few rows at a time."""
    import pyarrow.parquet

    options = {"page_checksum_verification": True, "pre_buffer": False, "buffer_size": _BUFFER}
    with pyarrow.parquet.ParquetFile(request.path, **options) as file:
        columns = _columns(file.schema_arrow, request)
        _check_sizes(file.metadata, columns)
        count = 0
        for part in file.iter_batches(batch_size=_PART, columns=columns, use_threads=False):
            count += part.num_rows
            yield part.select(columns)
        if count != file.metadata.num_rows:
            problem = f"has {count} rows, but says that it has {file.metadata.num_rows}: it is damaged"
            raise BadTableError(0, problem)


def _arrow_parts(request: TableRequest) -> Iterator[Any]:
    """Yield the same for a file in either Arrow format, whose batches are checked."""
    import pyarrow

    with pyarrow.OSFile(request.path) as file:
        whole_file = file.read(len(ARROW_MARK)) == ARROW_MARK
        file.seek(max(0, file.size() - len(_STREAM_END)))
        if not whole_file and file.read() != _STREAM_END:
            raise BadTableError(0, "is no Arrow file, or is cut short")
        file.seek(0)
        if whole_file:
            reader = pyarrow.ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            reader = pyarrow.ipc.open_stream(file)
            batches = iter(reader)
        columns = _columns(reader.schema, request)
        first = 1
        for batch in batches:
            _check_batch(batch, columns, first)
            first += batch.num_rows
            wanted = batch.select(columns)
            for start in range(0, batch.num_rows, _PART):
                yield wanted.slice(start, _PART)


def _check_batch(batch: Any, columns: list[str], first: int) -> None:
    """Raise BadTableError for the first value that is no valid text, and ArrowInvalid for any other defect."""
    import pyarrow

    try:
        batch.validate(full=True)
    except pyarrow.ArrowInvalid:
        batch.validate()
        for at in range(batch.num_rows):
            for name in columns:
                _value(batch, name, at, first)
        raise


def _columns(schema: Any, request: TableRequest) -> list[str]:
    """Return the columns to read, after a check of their names and types."""
    names = list(schema.names)
    for name, field in request.needed.items():
        if name not in names:
            raise BadTableError(0, f"has no column {name!r} ({field}); it has {', '.join(names) or 'none'}")
    wanted = names if request.all_columns else list(request.needed)
    for name in wanted:
        if names.count(name) > 1:
            raise BadTableError(0, f"has {names.count(name)} columns {name!r}; rename all but one")
        if wrong := _not_json(schema.field(name).type, DEEPEST):
            problem = f"has {wrong} in column {name!r}, which is no JSON; name the columns to read with prompts.columns"
            raise BadTableError(0, problem)
    return wanted


def _not_json(kind: Any, depth: int) -> str:
    """Return the part of a type that this module does not write as JSON; empty if there is none."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    plain = (types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_string)
    if any(is_kind(kind) for is_kind in (*plain, types.is_large_string, types.is_string_view)):
        return ""
    inner: list[Any] = []
    if types.is_struct(kind):
        inner = [kind.field(place).type for place in range(kind.num_fields)]
        fields = [kind.field(place).name for place in range(kind.num_fields)]
        if len(set(fields)) < len(fields):
            return "a struct with two fields of one name"
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = [kind.value_type]
    else:
        return f"{kind}"
    if not depth:
        return f"lists and structs nested deeper than {DEEPEST}"
    return next(filter(None, (_not_json(part, depth - 1) for part in inner)), "")


def _check_sizes(metadata: Any, columns: list[str]) -> None:
    """Refuse a file with too many rows or too large ones, according to its own metadata."""
    if metadata.num_rows > MOST_ROWS:
        raise BadTableError(0, f"has {metadata.num_rows} rows; the most is {MOST_ROWS}: give a part of it")
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for at in range(group.num_columns):
            chunk = group.column(at)
            name = next((name for name in columns if _within(chunk.path_in_schema, name)), None)
            size = chunk.total_uncompressed_size
            if name is not None and size > LARGEST_ROW * max(1, group.num_rows):
                problem = (
                    f"has {size} bytes in {group.num_rows} rows of column {name!r}; a row has at most {LARGEST_ROW}"
                )
                raise BadTableError(0, problem)


def _within(path: str, column: str) -> bool:
    return path == column or path.startswith(f"{column}.")


def _rows_of(part: Any, columns: list[str], start: int) -> Iterator[str]:
    if part.nbytes > LARGEST_ROW * part.num_rows:
        problem = f"and the {part.num_rows - 1} after it have {part.nbytes} bytes; a row has at most {LARGEST_ROW}"
        raise BadTableError(start, problem)
    try:
        found = part.to_pylist()
    except (ValueError, TypeError):  # a string that is not UTF-8: find it
        found = [{name: _value(part, name, at, start) for name in columns} for at in range(part.num_rows)]
    for number, data in enumerate(found, start):
        try:
            text = json.dumps(data, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError) as error:
            wrong = next(name for name in columns if not _is_json(data[name]))
            raise BadTableError(number, f"has a value in column {wrong!r} that is no JSON: {error}") from error
        if len(text) > LARGEST_ROW:
            raise BadTableError(number, f"has {len(text)} characters; a row has at most {LARGEST_ROW} bytes")
        yield text


def _value(part: Any, column: str, at: int, start: int) -> Any:
    try:
        return part.column(column)[at].as_py()
    except (ValueError, TypeError) as error:
        raise BadTableError(start + at, f"has no text in column {column!r}: {error}") from error


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError):
        return False
    return True


def main(arguments: list[str]) -> None:
    """Write the requested rows, and a last line with their number or an error."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    count = 0
    try:
        for row in rows(TableRequest(**json.loads(arguments[0]))):
            sys.stdout.buffer.write(b"R" + row.encode() + b"\n")
            count += 1
        last = f"Z{count}"
    except BadTableError as error:
        last = "E" + json.dumps([error.row, error.problem])
    sys.stdout.buffer.write(last.encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
