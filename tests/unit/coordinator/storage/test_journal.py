"""The journal after a crash at any byte, and on a full disk."""

import errno
import io
from pathlib import Path
from typing import BinaryIO

import pytest

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.journal import Journal, frame
from rlhf_coordinator.storage.journal_pb2 import Begun, Record
from rlhf_coordinator.storage.sample_codec import packed


def finished(index: int) -> Record:
    tokens = packed("int32", bytes(range(4 * index, 4 * index + 4)))
    return Record(finished=pb.FinishedSample(key=pb.SampleKey(sample=index), tokens=tokens, finish_reason="stop"))


def write(folder: Path, count: int) -> Journal:
    journal = Journal(folder)
    journal.begin(Begun(iteration=7, coordinator_epoch=1))
    for index in range(count):
        journal.append(finished(index))
    return journal


def test_what_was_appended_survives_a_kill_without_commit(tmp_path: Path) -> None:
    write(tmp_path, 3)
    records = Journal(tmp_path).read(7)
    assert [record.WhichOneof("record") for record in records] == ["begun", "finished", "finished", "finished"]
    assert records[2] == finished(1)


def test_a_death_at_any_byte_leaves_whole_records_and_a_journal_that_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "whole", 3).close()
    whole = (tmp_path / "whole" / "iteration-000007.log").read_bytes()
    records = Journal(tmp_path / "whole").read(7)
    ends = [sum(len(frame(record)) for record in records[: count + 1]) for count in range(len(records))]
    journal = Journal(tmp_path / "torn")
    for cut in range(len(whole) + 1):
        journal.path(7).write_bytes(whole[:cut])
        complete = sum(end <= cut for end in ends)
        assert journal.read(7) == records[:complete]
        journal.resume(7)
        journal.append(finished(9))
        assert journal.read(7) == [*records[:complete], finished(9)]


def test_damage_and_zeros_end_a_segment(tmp_path: Path) -> None:
    journal = write(tmp_path, 2)
    data = bytearray(journal.path(7).read_bytes())
    journal.path(7).write_bytes(bytes(data) + bytes(64))
    assert len(journal.read(7)) == 3
    data[-1] ^= 1
    journal.path(7).write_bytes(data)
    assert len(journal.read(7)) == 2


def test_a_full_disk_is_a_storage_error_and_leaves_no_half_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = write(tmp_path, 1)

    def half(self: Journal, data: bytes) -> None:
        file: BinaryIO | None = self._segment
        assert file is not None
        file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_write", half)
        with pytest.raises(JobError, match="No space left on device") as error:
            journal.append(finished(1))
    assert error.value.failure.exit_code == ExitCode.STORAGE
    assert error.value.failure.field == "RLHF_RUN_DIR"
    journal.append(finished(2))
    assert journal.read(7)[1:] == [finished(0), finished(2)]


class BrokenSegment(io.BytesIO):
    """A segment on a disk that fails half-way in a write, and then for every call in `fails`."""

    def __init__(self, fails: tuple[str, ...]) -> None:
        super().__init__()
        self.fails = fails

    def write(self, data: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def truncate(self, size: int | None = None) -> int:
        return self._then("truncate") or super().truncate(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._then("seek") or super().seek(offset, whence)

    def tell(self) -> int:
        return self._then("tell") or super().tell()

    def _then(self, call: str) -> int:
        if call in self.fails:
            raise OSError(errno.ESTALE, "Stale file handle")
        return 0


@pytest.mark.parametrize("fails", [(), ("truncate",), ("seek",), ("tell",)])
def test_a_disk_that_fails_twice_is_a_storage_error(tmp_path: Path, fails: tuple[str, ...]) -> None:
    """The second failure, of cutting the half record off, was once not the job's failure but a crash."""
    journal = write(tmp_path, 1)
    journal.close()
    journal._segment = BrokenSegment(fails)
    with pytest.raises(JobError, match="Stale file handle" if "tell" in fails else "Input/output error") as error:
        journal.append(finished(1))
    assert (error.value.failure.exit_code, error.value.failure.field) == (ExitCode.STORAGE, "RLHF_RUN_DIR")


def test_a_half_record_that_cannot_be_cut_off_takes_no_more_records(tmp_path: Path) -> None:
    """Records behind a half one would be lost."""
    journal = write(tmp_path, 1)
    journal.close()
    journal._segment = BrokenSegment(("truncate",))
    with pytest.raises(JobError):
        journal.append(finished(1))
    with pytest.raises(JobError, match="Stale file handle"):
        journal.append(finished(2))
    journal.resume(7)
    journal.append(finished(3))
    assert journal.read(7)[1:] == [finished(0), finished(3)]


def test_a_segment_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.path(7).symlink_to("/proc/self/mem")  # a file whose read fails, as on a broken disk
    with pytest.raises(JobError, match=r"iteration-000007.log cannot be read: .*Input/output error") as error:
        journal.read(7)
    assert error.value.failure.reason == "JournalDamaged"


def test_pruning_removes_what_checkpoints_cover(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for iteration in range(4):
        journal.begin(Begun(iteration=iteration))
    journal.prune(2)
    assert journal.iterations() == [2, 3]


def test_a_segment_that_cannot_be_removed_stays_and_one_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.path(0).mkdir()
    journal.path(1).write_bytes(b"")
    journal.prune(2)
    assert journal.iterations() == [0]
    with pytest.raises(JobError, match="journal"):
        journal.resume(0)


def test_facts_of_the_job_are_replaced_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.job() == {}
    journal.write_job({"coordinator_epoch": 1})
    journal.write_job({"coordinator_epoch": 2})
    assert Journal(tmp_path).job() == {"coordinator_epoch": 2}
    assert not list(tmp_path.glob(".tmp-*"))
