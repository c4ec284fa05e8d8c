"""A run folder's reports are readable during the run, and correct after any restart."""

import errno
import json
import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.reports.trackers.metrics_jsonl import MetricsJsonl, read_metrics
from rlhf_coordinator.reports.trackers.run_trackers import RunTrackers, open_trackers
from rlhf_coordinator.reports.trackers.summary_json import summarise
from rlhf_coordinator.reports.trackers.timeline_json import TimelineFile, read_spans
from rlhf_coordinator.reports.trackers.tracker import Tracker


def span(worker: str, name: str, start: float, end: float, iteration: int = 0) -> pb.Span:
    return pb.Span(worker=worker, name=name, start_ns=int(start * 1e9), end_ns=int(end * 1e9), iteration=iteration)


def test_a_run_leaves_every_report(tmp_path: Path) -> None:
    trackers = open_trackers(tmp_path, 0, clock=iter(range(0, 10**12, 10**9)).__next__)
    for iteration in range(20):
        trackers.span(span("generation-0", "decode", iteration, iteration + 0.5, iteration))
        trackers.iteration(iteration, {"reward": iteration / 20, "samples_per_second": 8.0, "actor/loss": math.nan})
    trackers.event(5, "WorkerLost", "generation-0 was lost", worker="generation-0")
    trackers.finish({"phase": "Complete", "restarts": {"generation-0": 1}, "reward_max": None})

    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(20))
    assert lines[3]["actor/loss"] is None
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reward_first"] == pytest.approx(0.025)
    assert summary["reward_last"] == pytest.approx(0.925)
    assert summary["samples_per_second"] == pytest.approx(8.0)
    assert (summary["iterations"], summary["phase"], summary["restarts"]) == (20, "Complete", {"generation-0": 1})
    assert "reward_max" not in summary
    events = json.loads((tmp_path / "timeline.json").read_text())
    assert sum(event["ph"] == "X" for event in events) == 20
    assert any(event.get("name") == "WorkerLost" for event in events)
    assert json.loads((tmp_path / "events.jsonl").read_text())["kind"] == "WorkerLost"


def test_stragglers_after_the_end_are_left_out(tmp_path: Path) -> None:
    trackers = open_trackers(tmp_path, 0)
    trackers.finish({"phase": "Complete"})
    trackers.span(span("generation-0", "decode", 1, 2))
    trackers.event(5, "WorkerLost", "generation-0 hung up")
    assert (tmp_path / "events.jsonl").read_text() == ""
    assert list(read_spans(tmp_path / "timeline.json")) == []


def test_a_restart_forgets_what_will_be_done_again(tmp_path: Path) -> None:
    first = open_trackers(tmp_path, 0)
    for iteration in range(5):
        first.span(span("training-0", "train/actor/F", iteration, iteration + 1, iteration))
        first.iteration(iteration, {"reward": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "rew')
    with (tmp_path / "timeline.json").open("ab") as file:
        file.write(b'{"ph":"X","na')

    second = open_trackers(tmp_path, 3)
    second.span(span("training-0", "train/actor/F", 3, 4, 3))
    for iteration in range(3, 6):
        second.iteration(iteration, {"reward": 2.0})
    second.finish({})
    third = open_trackers(tmp_path, 6)
    third.iteration(6, {"reward": 3.0})
    third.finish({})

    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["iteration"], line["reward"]) for line in lines] == [
        *((i, 1.0) for i in range(3)),
        *((i, 2.0) for i in range(3, 6)),
        (6, 3.0),
    ]
    assert json.loads((tmp_path / "timeline.json").read_text())
    assert [s.iteration for s in read_spans(tmp_path / "timeline.json")] == [0, 1, 2, 3, 4, 3]


def test_lines_that_a_power_loss_damaged_are_skipped(tmp_path: Path) -> None:
    trackers = open_trackers(tmp_path, 0)
    trackers.span(span("generation-0", "decode", 1, 2))
    trackers.finish({})
    path = tmp_path / "timeline.json"
    path.write_bytes(path.read_bytes() + b'\0\0\0\0\0\n{"ph":"X","name":"\xff"}\n')
    assert [each.name for each in read_spans(path)] == ["decode"]


def test_tensorboard_reads_each_step_once_after_a_restart(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, reward in ((0, 1.0), (2, 2.0)):
        trackers = open_trackers(tmp_path, first, clock=partial(int, 1e9 * (1 + first)))
        for iteration in range(first, first + 3):
            trackers.iteration(iteration, {"reward": reward, "kl": math.inf})
        trackers.finish({})
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert accumulator.Tags()["scalars"] == ["reward"]
    assert [(e.step, e.value) for e in accumulator.Scalars("reward")] == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 2)]


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 400))
def test_metrics_survive_a_cut_at_any_byte(written: int, restart: int, cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        file = MetricsJsonl(path.parent, 0)
        for iteration in range(written):
            file.iteration(iteration, iteration, {"reward": 0.5})
        file.finish({})
        path.write_bytes(path.read_bytes()[:cut])
        whole = path.read_bytes().count(b"\n")
        again = MetricsJsonl(path.parent, restart)
        again.iteration(restart, 9, {"reward": 1.0})
        again.finish({})
        result = [line["iteration"] for line in read_metrics(path)]
        assert result[-1] == restart
        assert result[:-1] == [i for i in range(written) if i < restart][: len(result) - 1]
        assert len(result) - 1 in (min(whole, restart), min(whole + 1, restart, written))


def test_a_full_timeline_makes_room(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    file = TimelineFile(path, max_bytes=2000)
    for i in range(100):
        file.span("generation-0", "decode", i, i + 1, i, {})
        file.flush()
    file.close()
    assert path.stat().st_size < 4000
    assert json.loads((tmp_path / "timeline-previous.json").read_text())
    assert {s.worker for s in read_spans(path)} == {"generation-0"}


def test_a_summary_of_nothing_and_of_one_iteration() -> None:
    assert summarise([], {})["iterations"] == 0
    assert summarise([], {})["reward_first"] is None
    huge = {"iteration": 0, "time_ns": 5, "reward": 10**400, "samples_per_second": 10**400}
    assert summarise([huge], {})["reward_last"] is None
    summary = summarise([{"iteration": 0, "time_ns": 5, "reward": 0.5}], {"seconds": 3.0})
    assert (summary["reward_first"], summary["reward_last"], summary["seconds"]) == (0.5, 0.5, 3.0)


class FullDiskTracker(Tracker):
    """Fails every write."""

    def span(self, span: pb.Span) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def iteration(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def event(self, time_ns: int, kind: str, message: str, attributes: Mapping[str, str]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def finish(self, summary: Mapping[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


class CountingTracker(Tracker):
    """Counts its input."""

    iterations = events = 0

    def iteration(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        self.iterations += 1

    def event(self, time_ns: int, kind: str, message: str, attributes: Mapping[str, str]) -> None:
        self.events += 1


def test_an_iteration_that_a_required_tracker_cannot_record_fails_the_job(tmp_path: Path) -> None:
    trackers = RunTrackers(tmp_path, {"metrics.jsonl": FullDiskTracker()}, required=["metrics.jsonl"])
    with pytest.raises(JobError) as error:
        trackers.iteration(0, {"reward": 1.0})
    assert (error.value.failure.reason, error.value.failure.exit_code) == ("StorageFull", ExitCode.STORAGE)
    trackers.finish({})


def test_a_view_that_cannot_be_written_is_given_up_once_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counting = CountingTracker()
    trackers = RunTrackers(tmp_path, {"full": FullDiskTracker(), "counting": counting})
    for iteration in range(3):
        trackers.iteration(iteration, {})
        trackers.event(iteration, "worker-lost", "generation-0 is lost")
    assert (counting.iterations, counting.events) == (3, 4), "that it was given up is an event, too"
    assert caplog.text.count("full is not written from now on") == 1


def test_a_required_tracker_that_cannot_be_opened_fails_the_job_and_a_view_does_not(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").mkdir()
    open_trackers(tmp_path, 0).finish({})
    (tmp_path / "events.jsonl").unlink()
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(JobError, match=r"events\.jsonl cannot be written"):
        open_trackers(tmp_path, 0)


def test_a_view_whose_library_is_not_installed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    trackers = open_trackers(tmp_path, 0)
    trackers.iteration(0, {"reward": 0.5})
    trackers.finish({})
    assert "tensorboard is not written: there is no module tensorboard: pip install tensorboard" in caplog.text
    assert [line["reward"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0.5]
    assert not (tmp_path / "tensorboard").exists()


def test_an_iteration_given_again_is_recorded_once(tmp_path: Path) -> None:
    trackers = open_trackers(tmp_path, 0)
    trackers.iteration(0, {"reward": 1.0})
    again = open_trackers(tmp_path, 1)
    again.iteration(0, {"reward": 1.0})
    again.iteration(1, {"reward": 2.0})
    again.finish({})
    assert [line["iteration"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
