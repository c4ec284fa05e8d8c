"""Tables of prompts: the rows of a parquet or Arrow file, by columns, as JSON objects.

A separate process reads the file (`table_reader`). An end of it before the last row is an error of the file. Must never
import pyarrow.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from rlhf_coordinator.storage.prompt_places import Place
from rlhf_coordinator.storage.table_reader import TableRequest

PARQUET_MARK: Final = b"PAR1"
"""First bytes of a parquet file."""
SILENCE: Final = 300.0
"""Seconds without output before the reader is ended."""
_BLOCK: Final = 1 << 20
"""Bytes to read from the process at once."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row."""

    place: Place
    data: dict[str, Any]
    text: str
    """Row as JSON."""


def table_rows(whole: Place, needed: Mapping[str, str], *, all_columns: bool) -> Iterator[TableRow]:
    """Yield the rows of a parquet or Arrow file with the columns that are `needed`, or all of them. Raises JobError.

    `needed`: name of a column -> the field of the manifest that requires it.
    """
    request = json.dumps(asdict(TableRequest(str(whole.path), dict(needed), all_columns)))
    command = [sys.executable, "-P", "-m", "rlhf_coordinator.storage.table_reader", request]
    number, complete = 0, False
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as reader:  # noqa: S603
        assert reader.stdout is not None
        try:
            for line in _lines(reader.stdout.fileno(), whole):
                kind, text = line[:1], line[1:]
                if kind == b"E":
                    row, problem = json.loads(text)
                    raise replace(whole, number=row, unit="row").bad(problem)
                if kind == b"Z":
                    complete = int(text) == number
                    break
                number += 1
                yield TableRow(replace(whole, number=number, unit="row"), json.loads(text), text.decode())
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is ended below
                reader.wait(SILENCE)
        finally:
            reader.kill()
    if not complete:
        raise whole.bad(f"cannot be read: after row {number} its reader {_ending(reader.returncode)}")


def _lines(output: int, whole: Place) -> Iterator[bytes]:
    """Yield the whole lines from a pipe. Raises JobError when nothing arrives within SILENCE."""
    coming = select.poll()
    coming.register(output, select.POLLIN)
    rest = b""
    while coming.poll(SILENCE * 1000):
        block = os.read(output, _BLOCK)
        if not block:
            return
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    problem = f"cannot be read: its reader gave no row for {SILENCE:.0f} s; is the volume that holds it there?"
    raise whole.bad(problem)


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}: the file is damaged, or needs more memory than there is"
    return f"ended with exit code {code}"
