"""Histories of samples: which worker decoded a sample when, over moves and lost workers."""

import json
from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process

from rlhf_coordinator.job.job_run import JobRun, load_iteration_prompts
from rlhf_coordinator.job.sample_histories import iteration_histories, note_places, record_histories
from rlhf_coordinator.reports.trackers.histories_jsonl import FILE, HistoriesJsonl
from rlhf_coordinator.state.sample import PackedResponse


def begun(folder: Path, metrics: str = "Enabled") -> JobRun:
    """Return a job in its first iteration, whose clock started at 10 s."""
    run, _ = begin_in_process(folder, make_job(folder, metrics=metrics), HistoriesJsonl(folder, 0))
    load_iteration_prompts(run.state, run.prompts)
    run.times.begin_iteration(10.0)
    run.state.ledger.take_places()
    return run


def test_a_sample_is_followed_over_a_move_a_lost_worker_and_its_end(tmp_path: Path) -> None:
    run = begun(tmp_path)
    ledger = run.state.ledger
    ledger.assign(0, "generation-0")
    note_places(run, 10.5)
    source, destination = ledger.migrate(0, "generation-1")
    note_places(run, 11.0)
    assert ledger.moved(0, source, destination, PackedResponse())
    note_places(run, 11.5)
    ledger.reclaim("generation-1")
    note_places(run, 12.0)
    ledger.assign(0, "generation-0")
    note_places(run, 12.5)
    run.state.incremental.finished[0] = 13.0
    histories = iteration_histories(run, 14.0, 60_000_000_000)
    assert histories.began_ns == 56_000_000_000
    assert histories.workers == ["generation-0", "generation-1"]
    assert histories.places[0] == [(0.5, 0), (1.5, 1), (2.0, -1), (2.5, 0)]
    assert histories.places[1] == []
    assert (histories.finished[0], histories.scored[0], histories.finished[1]) == (3.0, None, None)


@pytest.mark.parametrize(("metrics", "lines"), [("Enabled", 1), ("Disabled", 0)])
def test_with_metrics_disabled_nothing_is_recorded(tmp_path: Path, metrics: str, lines: int) -> None:
    run = begun(tmp_path, metrics)
    run.state.ledger.assign(0, "generation-0")
    note_places(run, 10.5)
    record_histories(run)
    assert bool(run.state.incremental.places) == bool(lines)
    written = (tmp_path / FILE).read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in written] == [0] * lines
