"""The coordinator chooses the training schedule with simulated ranks: it measures, searches, records and reuses it."""

from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import Coordinated, StartedJobs, expected_weights, make_job
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import Crew

from rlhf_common import control_pb2 as pb

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SECONDS = 120.0
"""Seconds for the search, a separate process that loads its solvers: seconds on a quiet machine."""


def begin(jobs: StartedJobs, folder: Path, mode: str, pace: Pace) -> tuple[Coordinated, Crew]:
    fusion = {"intraStage": {"mode": mode}, "interStage": {"mode": "Disabled"}}
    job = make_job(folder, fusion=fusion, training={"parallelism": {"pipeline": 2}, "microBatchSize": 2})
    return jobs.begin(job, folder, pace)


async def test_auto_takes_what_was_measured_fastest_and_a_restarted_coordinator_keeps_it(
    jobs: StartedJobs, tmp_path: Path
) -> None:
    pace = Pace(step_seconds={"serial-1f1b": 0.5, "fused": 0.3, "fused-split": 0.4})
    coordinated, workers = begin(jobs, tmp_path, "Auto", pace)
    await coordinated.until("Generating", 1, SECONDS)
    ranks = [workers["training-0"], workers["training-1"]]
    assert [rank.measures for rank in ranks] == [2, 2]  # stages, then mini-batches
    await coordinated.cancel()
    coordinated.start()
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert [rank.measures for rank in ranks] == [2, 2]
    assert {rank.weights for rank in ranks} == {expected_weights(coordinated.job)}
    assert {method for rank in ranks for method in rank.schedules} == {"fused"}
    (said,) = coordinated.messages("schedule")
    assert said.startswith("training runs schedule fused: serial-1f1b 0.5 s (predicted ")
    assert {line["training/schedule"] for line in coordinated.lines} == {1.0}


async def test_auto_stays_serial_when_serial_is_measured_fastest(jobs: StartedJobs, tmp_path: Path) -> None:
    pace = Pace(step_seconds={"serial-1f1b": 0.3, "fused": 0.2999, "fused-split": 0.4})
    coordinated, workers = begin(jobs, tmp_path, "Auto", pace)
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert set(workers["training-0"].schedules) == {"serial-1f1b"}


async def test_a_rank_that_cannot_measure_leaves_training_serial(jobs: StartedJobs, tmp_path: Path) -> None:
    def fail(rank: int, order: pb.Measure) -> pb.Failure | None:
        return pb.Failure(reason="OutOfMemory", message="no room", retryable=True) if rank == 1 else None

    coordinated, workers = begin(jobs, tmp_path, "Auto", Pace(fail_measure=fail))
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    assert set(workers["training-0"].schedules) == {"serial-1f1b"}
    (said,) = coordinated.messages("schedule-not-fused")
    assert said == "training-1 could not measure its pipeline stages: no room"


async def test_a_rank_that_dies_while_it_measures_measures_again_with_its_group(
    jobs: StartedJobs, tmp_path: Path
) -> None:
    def die(rank: int, order: pb.Measure) -> pb.Failure | None:
        if rank == 1 and workers["training-1"].measures == 1:
            workers["training-1"].kill()
            return pb.Failure(reason="PeerLost", message="gone", retryable=True, exit_code=75)
        return None

    coordinated, workers = begin(jobs, tmp_path, "FusedSplit", Pace(fail_measure=die))
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert workers["training-1"].measures == 2
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    assert set(workers["training-0"].schedules) == {"fused-split"}
