"""Free space of file systems: one that hangs has no value and blocks nothing else."""

import threading
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
