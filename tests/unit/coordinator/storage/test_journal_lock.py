"""Two coordinators of one job: the second waits for the first, and reports it."""

import errno
import fcntl
import logging
import os
from pathlib import Path

import pytest

from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage import journal_lock
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.journal_lock import PATIENCE_SECONDS, JournalLock, doubt_of, hold
from rlhf_coordinator.storage.journal_pb2 import Begun, Record


def test_the_second_waits_until_the_first_has_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, waited = hold(tmp_path), list[float]()

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            first.close()

    with caplog.at_level(logging.WARNING):
        hold(tmp_path, sleep=sleep).close()
    assert len(waited) == 3
    assert [record.getMessage() for record in caplog.records if record.name == "coordinator"] == [
        f"waits for the previous coordinator, which still holds {tmp_path / 'coordinator.lock'}"
    ]


def test_one_that_never_ends_is_named_and_no_failure_of_the_job(tmp_path: Path) -> None:
    first, now = hold(tmp_path), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(JobError, match="another coordinator of this job to end: it holds") as raised:
        hold(tmp_path, clock=lambda: now[0], sleep=sleep)
    assert raised.value.failure.exit_code == ExitCode.RESTART
    assert now[0] == pytest.approx(PATIENCE_SECONDS, abs=1)
    first.close()


def test_a_process_that_dies_leaves_the_journal_free(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        hold(tmp_path)
        os._exit(0)
    os.waitpid(child, 0)
    hold(tmp_path, sleep=lambda _: pytest.fail("it had to wait")).close()


def test_a_volume_without_locks_is_used_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING):
        lock = journal_lock.hold(tmp_path)
    lock.close()
    assert "does not support locks" in lock.doubt
    assert lock.ours
    assert "does not support locks" in caplog.text


def test_whoever_lost_the_lock_without_knowing_ends_before_it_writes(tmp_path: Path) -> None:
    """A file server does this to a node that it has not heard from for the length of its lease."""
    first = hold(tmp_path)
    assert first.ours
    (tmp_path / "coordinator.lock").unlink()
    assert not first.ours
    second = hold(tmp_path)
    assert second.ours
    ended: list[int] = []
    journal = Journal(tmp_path, first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JournalLock, "check", lambda lock: None if lock.ours else ended.append(75))
        journal.write_job({})
    assert ended == [75]


def test_what_an_earlier_coordinator_still_writes_is_read_by_nobody(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    first.begin(Begun(iteration=3, coordinator_epoch=1))
    second = Journal(tmp_path)
    second.resume(3)
    first.append(Record(begun=Begun(iteration=3, coordinator_epoch=1)))
    second.append(Record(begun=Begun(iteration=3, coordinator_epoch=2)))
    first.append(Record(begun=Begun(iteration=3, coordinator_epoch=1)))
    assert [record.begun.coordinator_epoch for record in Journal(tmp_path).read(3)] == [1, 2]
    first.begin(Begun(iteration=4, coordinator_epoch=1))
    second.begin(Begun(iteration=4, coordinator_epoch=2))
    first.append(Record(begun=Begun(iteration=4, coordinator_epoch=1)))
    assert [record.begun.coordinator_epoch for record in Journal(tmp_path).read(4)] == [2]


MOUNTS = r"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /shared rw,relatime shared:1 - nfs4 10.0.0.9:/export rw,vers=4.2,hard
31 22 0:41 / /alone rw,relatime - nfs 10.0.0.9:/export rw,vers=3,local_lock=flock
32 22 0:42 / /bucket rw,relatime - fuse.s3fs s3fs rw,user_id=0
33 22 0:43 / /lustre rw,relatime - lustre 10.0.0.9@tcp:/fs rw,flock
34 22 0:44 / /slow rw,relatime - lustre 10.0.0.9@tcp:/fs rw,lazystatfs
35 22 0:45 / /with\040space rw,relatime - ceph 10.0.0.9:/ rw
36 30 0:46 / /shared/bucket rw,relatime - fuse.gcsfuse b rw
"""


@pytest.mark.parametrize(
    ("folder", "doubt"),
    [
        ("/home/run", ""),
        ("/shared/run", ""),
        ("/sharedbutnot", ""),
        ("/lustre/a/b", ""),
        ("/with space/run", ""),
        ("/alone/run", "mounted with local_lock=flock, so its locks are this node's own"),
        ("/bucket/run", "is on fuse.s3fs, whose locks other nodes may not see"),
        ("/shared/bucket/run", "is on fuse.gcsfuse"),
        ("/slow", "is on lustre mounted without flock"),
    ],
)
def test_whether_other_nodes_see_the_lock_follows_from_the_mount(tmp_path: Path, folder: str, doubt: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    result = doubt_of(Path(folder), mounts)
    assert doubt in result
    assert bool(result) == bool(doubt)


def test_a_machine_that_does_not_tell_its_mounts_is_doubted(tmp_path: Path) -> None:
    assert "cannot be read" in doubt_of(tmp_path, tmp_path / "nothing")
