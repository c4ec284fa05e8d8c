"""Free space of file systems: one that hangs has no value and blocks nothing else."""

import threading
from collections.abc import Iterable
from concurrent.futures import Future, wait
from pathlib import Path

import pytest

from rlhf_coordinator.service import disk_space
from rlhf_coordinator.service.disk_space import DiskSpace, Space, space_of


def test_a_folder_that_is_not_there_yet_has_the_space_of_its_file_system(tmp_path: Path) -> None:
    space = space_of(tmp_path / "not" / "yet")
    assert space is not None
    assert 0 < space.free <= space.size


def test_an_answer_is_kept_and_then_asked_for_again() -> None:
    asked, now = list[Path](), [0.0]

    def ask(folder: Path) -> Space:
        asked.append(folder)
        return Space(len(asked), 10)

    disks = DiskSpace({"run": Path("/run")}, ask, lambda: now[0])
    assert disks.read() == disks.read() == {"run": Space(1, 10)}
    now[0] = 11.0
    assert disks.read() == {"run": Space(2, 10)}
    assert len(asked) == 2


def test_a_file_system_that_hangs_has_no_number_and_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, over, now = list[Path](), threading.Event(), [0.0]

    def ask(folder: Path) -> Space | None:
        asked.append(folder)
        if folder == Path("/hangs"):
            over.wait(60)
        return Space(1, 2)

    monkeypatch.setattr(disk_space, "WAIT_SECONDS", 0.05)
    try:
        disks = DiskSpace({"run": Path("/run"), "checkpoints": Path("/hangs")}, ask, lambda: now[0])
        assert disks.read() == disks.read() == {"run": Space(1, 2)}
        now[0] = 20.0
        assert disks.read() == {"run": Space(1, 2)}
        assert asked.count(Path("/hangs")) == 1
    finally:
        over.set()


def test_file_systems_that_hang_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    over, waits = threading.Event(), list[float | None]()

    def ask(folder: Path) -> Space | None:
        over.wait(60)
        return None

    def recorded(queries: Iterable[Future[None]], timeout: float | None = None) -> object:
        waits.append(timeout)
        return wait(queries, timeout)

    monkeypatch.setattr(disk_space, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(disk_space, "wait", recorded)
    try:
        assert DiskSpace({name: Path(name) for name in ("/a", "/b", "/c")}, ask).read() == {}
        assert waits == [0.05]
    finally:
        over.set()


def test_a_query_that_fails_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    answers = iter([None, Space(1, 2)])

    def ask(folder: Path) -> Space:
        answer = next(answers)
        if answer is None:
            raise SystemExit  # ends the thread without a traceback
        return answer

    disks = DiskSpace({"run": Path("/run")}, ask)
    assert disks.read() == {}
    assert disks.read() == {"run": Space(1, 2)}
