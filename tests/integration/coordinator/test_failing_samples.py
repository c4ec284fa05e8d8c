"""A sample that no worker can decode, over real gRPC: tried elsewhere, then named; never an empty or zero result."""

from collections import Counter
from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import Coordinated, StartedJobs, expected_weights, make_job
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import Crew

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode

POISON = (1, 5)
"""(iteration, sample)."""


class Poison:
    """Makes workers fail on one sample, and counts the failures."""

    def __init__(self, how: str, times: int = 1000) -> None:
        self.how, self.left = how, times
        self.seen: Counter[str] = Counter()

    def __call__(self, worker: str, key: pb.SampleKey) -> str | None:
        if (key.iteration, key.sample) != POISON or not self.left:
            return None
        self.left -= 1
        self.seen[worker] += 1
        return self.how


def begin(jobs: StartedJobs, folder: Path, poison: Poison, **rollout: int) -> tuple[Coordinated, Crew]:
    settings = {"batchSize": 16, "maxResponseTokens": 48, **rollout}
    job = make_job(folder, iterations=3, rollout=settings)
    return jobs.begin(job, folder, Pace(tokens_per_tick=2, fail_decode=poison))


@pytest.mark.parametrize("how", ["refused", "crashed"])
async def test_the_job_fails_and_names_a_sample_that_nobody_can_decode(
    jobs: StartedJobs, tmp_path: Path, how: str
) -> None:
    poison = Poison(how)
    coordinated, workers = begin(jobs, tmp_path, poison)
    outcome = await coordinated.outcome()
    await workers.end()
    assert outcome.phase == "Failed"
    assert outcome.failure is not None
    assert (outcome.failure.reason, outcome.failure.exit_code) == ("SampleFailed", ExitCode.SAMPLE_FAILED)
    assert outcome.failure.field == "spec.rollout.maxFailedSamples"
    assert "sample 5 of iteration 1 (line " in outcome.failure.message
    assert sum(poison.seen.values()) == 3, "tried twice again"
    assert len(poison.seen) == 2, "and elsewhere"
    assert coordinated.messages("sample-failed")
    run = coordinated.run
    assert run is not None
    assert run.totals.failed == 0


@pytest.mark.parametrize("how", ["refused", "crashed"])
async def test_an_iteration_goes_on_without_a_failed_sample_where_that_is_allowed(
    jobs: StartedJobs, tmp_path: Path, how: str
) -> None:
    coordinated, workers = begin(jobs, tmp_path, Poison(how), maxFailedSamples=1)
    outcome = await coordinated.outcome()
    await workers.end()
    assert outcome.phase == "Complete"
    wanted = expected_weights(coordinated.job, failed={POISON})
    assert {workers[f"training-{rank}"].weights for rank in (0, 1)} == {wanted}, "all others are trained on, as ever"
    lines = coordinated.lines
    assert [line["samples/failed"] for line in lines] == [0, 1, 0]
    (text,) = coordinated.messages("sample-left-out")
    assert text.startswith("sample 5 of iteration 1 (line ")


async def test_a_failed_sample_stays_failed_when_the_coordinator_is_killed(jobs: StartedJobs, tmp_path: Path) -> None:
    poison = Poison("refused")
    coordinated, workers = begin(jobs, tmp_path, poison, maxFailedSamples=1)
    await coordinated.until("Training", 1)
    await coordinated.cancel()
    tries = sum(poison.seen.values())
    coordinated.start()
    outcome = await coordinated.outcome()
    await workers.end()
    assert outcome.phase == "Complete"
    assert sum(poison.seen.values()) == tries
    assert workers["training-0"].weights == expected_weights(coordinated.job, failed={POISON})


async def test_a_fault_that_passes_costs_nothing(jobs: StartedJobs, tmp_path: Path) -> None:
    coordinated, workers = begin(jobs, tmp_path, Poison("crashed", times=2))
    outcome = await coordinated.outcome()
    await workers.end()
    assert outcome.phase == "Complete"
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    assert not coordinated.messages("sample-left-out")
