"""The journal: the durable state of the coordinator. One append-only segment of framed records per iteration, and
`job.json`.

Frame: length (uint32), CRC-32 of the payload (uint32), payload (a `journal.proto` Record), little endian. Appended
records survive the process; after a commit they survive the machine. A torn tail is cut off when a segment is
continued.
"""

import json
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from google.protobuf.message import DecodeError

from rlhf_common.json_document import parse_json
from rlhf_coordinator.failures import JobError, storage_error
from rlhf_coordinator.storage.journal_lock import JournalLock
from rlhf_coordinator.storage.journal_pb2 import Begun, Record

log = logging.getLogger(__name__)

_FRAME: Final = struct.Struct("<II")
_SEGMENT: Final = "iteration-{:06d}.log"
_JOB_FILE: Final = "job.json"
_FIELD: Final = "RLHF_RUN_DIR"


def frame(record: Record) -> bytes:
    """Return a record's bytes on disk."""
    payload = record.SerializeToString()
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def unframe(data: bytes) -> Iterator[tuple[Record, int]]:
    """Yield (record, offset after it) for every whole record, up to the first torn or damaged one.

    A tail of zeros is no record.
    """
    offset = 0
    while offset + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, offset)
        payload = data[offset + _FRAME.size : offset + _FRAME.size + length]
        if not length or len(payload) < length or zlib.crc32(payload) != checksum:
            return
        offset += _FRAME.size + length
        try:
            yield Record.FromString(payload), offset
        except DecodeError:
            return


def sync_folder(folder: Path) -> None:
    """Make created, renamed and removed names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Write the whole file under a temporary name and rename it; it is durable on return. Raises OSError."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


class Journal:
    """The journal folder of a run.

    Methods that write records or facts raise JobError (exit code 23) when that fails.
    """

    def __init__(self, folder: Path, lock: JournalLock | None = None) -> None:
        """Create the folder. `lock`: this process's lock on it, which `check` checks; None without one."""
        self.folder, self.lock = folder, lock
        self.bytes_written = 0
        self._segment: BinaryIO | None = None
        self._torn: OSError | None = None  # error that left half a record at the end of the open segment
        self._name_is_durable = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error("the journal", folder, error, _FIELD) from error

    def check(self) -> None:
        """End the process when another coordinator has the journal. Raises JobError when the lock cannot be read."""
        if self.lock is not None:
            self.lock.check()

    # ---------------------------------------------------------------- the job's own facts

    def job(self) -> dict[str, Any]:
        """Return the facts of the last `write_job`; {} without one. Raises JobError when they cannot be read."""
        path = self.folder / _JOB_FILE
        try:
            facts = parse_json(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise JobError("JournalDamaged", f"{path} cannot be read: {error}", field=_FIELD) from error
        assert isinstance(facts, dict)
        return facts

    def write_job(self, facts: dict[str, Any]) -> None:
        """Replace the job's facts."""
        self.check()
        try:
            write_atomically(self.folder / _JOB_FILE, json.dumps(facts, indent=1, sort_keys=True).encode())
        except OSError as error:
            raise storage_error("the journal", self.folder, error, _FIELD) from error

    # ---------------------------------------------------------------- segments

    def path(self, iteration: int) -> Path:
        """Return the segment file of an iteration."""
        return self.folder / _SEGMENT.format(iteration)

    def iterations(self) -> list[int]:
        """Return the iterations with a segment, in order."""
        return sorted(int(path.stem.removeprefix("iteration-")) for path in self.folder.glob("iteration-*.log"))

    def read(self, iteration: int) -> list[Record]:
        """Return the whole records of a segment, up to the first torn or damaged one; empty without a segment.

        Raises JobError when it cannot be read.
        """
        path = self.path(iteration)
        try:
            return [record for record, _ in unframe(path.read_bytes())]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise JobError("JournalDamaged", f"{path} cannot be read: {error}", field=_FIELD) from error

    def begin(self, begun: Begun) -> None:
        """Begin a new segment in place of any file of its name, and close the previous one."""
        self.check()
        path = self.path(begun.iteration)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error("the journal", self.folder, error, _FIELD) from error
        self._open(path, 0)
        self._name_is_durable = False
        self.append(Record(begun=begun))

    def resume(self, iteration: int) -> None:
        """Continue a segment after its last whole record."""
        path, end = self.path(iteration), 0
        self.check()
        try:
            data = path.read_bytes()
            for _, offset in unframe(data):
                end = offset
            write_atomically(path, data[:end])
        except OSError as error:
            raise storage_error("the journal", self.folder, error, _FIELD) from error
        self._open(path, end)

    def append(self, record: Record) -> None:
        """Append a record to the open segment: it survives this process from here on."""
        assert self._segment is not None, "no segment is open"
        if self._torn is not None:
            raise storage_error("the journal", self.folder, self._torn, _FIELD)
        data = frame(record)
        try:
            end = self._segment.tell()
            try:
                self._write(data)
            except OSError:
                self._cut(end)
                raise
        except OSError as error:
            raise storage_error("the journal", self.folder, error, _FIELD) from error
        self.bytes_written += len(data)

    def commit(self) -> None:
        """Flush the open segment, so that its records survive the machine."""
        assert self._segment is not None, "no segment is open"
        self.check()
        try:
            os.fsync(self._segment.fileno())
            if not self._name_is_durable:
                sync_folder(self.folder)
                self._name_is_durable = True
        except OSError as error:
            raise storage_error("the journal", self.folder, error, _FIELD) from error

    def prune(self, before: int) -> None:
        """Remove the segments of iterations before this one. One that cannot be removed stays, with a warning."""
        for iteration in (iteration for iteration in self.iterations() if iteration < before):
            try:
                self.path(iteration).unlink(missing_ok=True)
            except OSError as error:
                log.warning("an old segment of the journal stays: %s", error)

    def close(self) -> None:
        """Close the open segment."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _write(self, data: bytes) -> None:
        assert self._segment is not None
        view = memoryview(data)
        while view:
            view = view[self._segment.write(view) :]

    def _cut(self, end: int) -> None:
        """Cut half a record off. If that fails, no more records are appended, because reading stops at the half one."""
        assert self._segment is not None
        try:
            self._segment.truncate(end)
            self._segment.seek(end)
        except OSError as error:
            log.error("half a record stays at the end of the journal: %s", error)
            self._torn = error

    def _open(self, path: Path, end: int) -> None:
        self._torn = None
        try:
            self.close()
            self._segment = path.open("r+b" if end else "wb", buffering=0)
            self._segment.truncate(end)
            self._segment.seek(end)
        except OSError as error:
            raise storage_error("the journal", self.folder, error, _FIELD) from error
