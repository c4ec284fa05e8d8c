"""Two coordinators of one job: the second waits for the first, and says so."""

import errno
import fcntl
import logging
import os
from pathlib import Path

import pytest

from rlhf_api.names import ExitCode
from rlhf_operator.coordinator.failures import JobError
from rlhf_operator.coordinator.storage import journal_lock
from rlhf_operator.coordinator.storage.journal_lock import PATIENCE_SECONDS, hold


def test_the_second_waits_until_the_first_has_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, waited = hold(tmp_path), list[float]()

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            os.close(first)

    with caplog.at_level(logging.WARNING):
        os.close(hold(tmp_path, sleep=sleep))
    assert len(waited) == 3
    assert [each.getMessage() for each in caplog.records] == [
        f"waits for the coordinator before it, which still has {tmp_path / 'coordinator.lock'}"
    ]


def test_one_that_never_ends_is_named_and_worth_another_try(tmp_path: Path) -> None:
    first, now = hold(tmp_path), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(JobError, match="another coordinator of this job to end: it holds") as raised:
        hold(tmp_path, clock=lambda: now[0], sleep=sleep)
    assert raised.value.failure.exit_code == ExitCode.FAILED
    assert now[0] == pytest.approx(PATIENCE_SECONDS, abs=1)
    os.close(first)


def test_a_process_that_dies_leaves_the_journal_free(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        hold(tmp_path)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(hold(tmp_path, sleep=lambda _: pytest.fail("it had to wait")))


def test_a_volume_without_locks_is_used_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING):
        os.close(journal_lock.hold(tmp_path))
    assert "knows no locks" in caplog.text
