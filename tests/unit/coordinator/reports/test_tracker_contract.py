"""The contract of every registered tracker: restarts, truncated ends, odd numbers, a disk that rejects writes."""

import math
import shutil
from pathlib import Path

import pytest
from tests.support.coordinator.sample_rows import sample_histories, sample_row
from tests.support.jobs.explained_runs import recorded_facts

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.reports.trackers.registry import TRACKERS
from rlhf_coordinator.reports.trackers.tracker import Tracker

pytestmark = pytest.mark.parametrize("name", TRACKERS)

METRICS = {"reward": 0.5, "kl": math.nan, "samples_per_second": 8.0, "actor/loss": -math.inf}


def use(tracker: Tracker, iterations: range, *, finish: bool = True) -> None:
    for iteration in iterations:
        span = pb.Span(worker="generation-0", name="decode", start_ns=iteration, end_ns=iteration + 5)
        tracker.span(span)
        tracker.event(iteration, "worker-lost", 'generation-0 is "lost"\n', {"worker": "generation-0"})
        tracker.samples(iteration, [sample_row()])
        tracker.facts(recorded_facts(iteration=iteration))
        tracker.histories(sample_histories(iteration))
        tracker.iteration(iteration, 10**9 * iteration, METRICS)
    if finish:
        tracker.finish({"phase": "Complete", "reward_first": None})


def test_it_writes_under_its_own_name_alone(name: str, tmp_path: Path) -> None:
    use(TRACKERS[name].open(tmp_path, 0), range(3))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_restart_goes_on_and_takes_the_last_iteration_again(name: str, tmp_path: Path) -> None:
    use(TRACKERS[name].open(tmp_path, 0), range(3), finish=False)
    use(TRACKERS[name].open(tmp_path, 2), range(2, 4), finish=False)
    third = TRACKERS[name].open(tmp_path, 3)
    third.iteration(2, 5, METRICS)
    use(third, range(3, 5))


def test_a_run_of_nothing_ends(name: str, tmp_path: Path) -> None:
    use(TRACKERS[name].open(tmp_path, 0), range(0))


def test_what_another_process_left_behind_torn_does_not_hold_it_up(name: str, tmp_path: Path) -> None:
    use(TRACKERS[name].open(tmp_path, 0), range(3))
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        path.write_bytes(path.read_bytes()[:-7] + b"\xff{")
    use(TRACKERS[name].open(tmp_path, 1), range(1, 4))


def test_what_cannot_be_written_is_an_operating_system_error(name: str, tmp_path: Path) -> None:
    """`RunTrackers` handles it; any other exception would end the coordinator."""
    shutil.rmtree(tmp_path)
    tmp_path.write_text("a file where the folder should be")
    with pytest.raises(OSError, match=r"Not a directory|exists"):
        use(TRACKERS[name].open(tmp_path, 0), range(1))
