"""Training starts after any answer of the search for schedules: with the serial table if the answer is unusable."""

import errno
from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling.training_schedule import candidates
from rlhf_coordinator.storage import journal
from rlhf_coordinator.training import schedule_choice
from rlhf_planner.schedule.serial import METHOD as SERIAL


def searching(folder: Path, mode: str) -> JobRun:
    """Return a job whose ranks have measured their stages."""
    fusion = {"intraStage": {"mode": mode}, "interStage": {"mode": "Disabled"}}
    run, _ = begin_in_process(folder, make_job(folder, fusion=fusion))
    run.state.schedule.stage = "searching"
    run.state.schedule.results = {"training-0": pb.MeasureResult(activation_room_bytes=1)}
    return run


async def search(run: JobRun, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]) -> None:
    async def answered(*_: object) -> dict[str, Any]:
        return answer

    monkeypatch.setattr(schedule_choice, "ask_module", answered)
    await schedule_choice._search(run)


def entry(run: JobRun, **changed: Any) -> dict[str, Any]:
    """Return an entry of the answer; a value of ... leaves a key out."""
    fields = {"table": run.context.schedule, "predicted": 1.0, "steps": []} | changed
    return {key: value for key, value in fields.items() if value is not ...}


@pytest.mark.parametrize("mode", ["Auto", "Fused"])
@pytest.mark.parametrize(
    "changed",
    [
        {"predicted": ...},
        {"predicted": "soon"},
        {"predicted": "1.0"},
        {"predicted": float("nan")},
        {"table": ...},
        {"table": "{}"},
        {"steps": ...},
        {"steps": [[[99, "F", 0, 0, 0.0, 1.0]]]},
    ],
)
async def test_an_entry_that_is_no_table_leaves_the_serial_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, changed: dict[str, Any]
) -> None:
    """The choice was once never made, so that training did not start."""
    run = searching(tmp_path, mode)
    fused = candidates(run.context.spec)
    await search(run, monkeypatch, {SERIAL: entry(run)} | {method: entry(run, **changed) for method in fused})
    assert (run.state.schedule.stage, run.state.schedule.method) == ("decided", SERIAL)
    stored = run.journal.job()["schedule"]
    assert (stored["method"], stored["table"]) == (SERIAL, run.context.schedule)
    assert stored["why"].startswith("the search for schedules failed")


@pytest.mark.parametrize("mode", ["Auto", "Fused"])
async def test_an_answer_without_a_method_leaves_the_serial_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    for number, answer in enumerate(({}, {SERIAL: None})):
        run = searching(tmp_path / str(number), mode)
        await search(run, monkeypatch, {method: entry(run) for method in answer})
        assert (run.state.schedule.stage, run.state.schedule.method) == ("decided", SERIAL)


async def test_a_choice_that_cannot_be_stored_fails_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = searching(tmp_path, "Auto")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal, "write_atomically", full)
    await search(run, monkeypatch, {})
    assert run.state.failure is not None
    assert run.state.failure.exit_code == ExitCode.STORAGE


async def test_a_usable_answer_is_timed_or_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, stage in (("Auto", "tables"), ("Fused", "decided")):
        run = searching(tmp_path / mode, mode)
        fused = candidates(run.context.spec)
        answer = {SERIAL: entry(run)} | {method: entry(run, predicted=0.1) for method in fused}
        await search(run, monkeypatch, answer)
        assert run.state.schedule.stage == stage
        assert run.state.schedule.method == (SERIAL if mode == "Auto" else fused[0])
