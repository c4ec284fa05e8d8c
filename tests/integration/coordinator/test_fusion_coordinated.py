"""Inter-stage fusion over real gRPC with simulated workers: the weights are the same despite moves and kills."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinator.coordinated import Coordinated, StartedJobs, expected_weights, make_job
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import Crew

from rlhf_common import control_pb2 as pb
from rlhf_common.channels import aio_channel
from rlhf_common.control_pb2_grpc import CoordinatorStub
from rlhf_common.names import Group
from rlhf_planner.inter_stage.costs import JOB_KEY, StageCosts

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SECONDS = 120.0


def begin(
    jobs: StartedJobs, folder: Path, inter_stage: dict[str, Any], pace: Pace | None = None, **spec: Any
) -> tuple[Coordinated, Crew]:
    fusion = {"intraStage": {"mode": "Disabled"}, "interStage": inter_stage}
    generation = spec.pop("generation", {"replicas": 4, "maxBatchSize": 6})
    job = make_job(folder, fusion=fusion, generation=generation, **spec)
    return jobs.begin(job, folder, pace or Pace(tokens_per_tick=1))


def fixed(threshold: int, pool: int, transfer: str = "Auto") -> dict[str, Any]:
    return {"mode": "Fixed", "threshold": threshold, "pool": pool, "transfer": transfer}


@pytest.mark.parametrize("transfer", ["KV", "Tokens"])
async def test_the_tail_gathers_on_the_pool_and_the_others_score(
    jobs: StartedJobs, tmp_path: Path, transfer: str
) -> None:
    inference = {"replicas": 0}
    coordinated, workers = begin(jobs, tmp_path, fixed(5, 1, transfer), batch=24, inference=inference)
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    reported = coordinated.lines
    moved = [line[f"fusion/moved_{'kv' if transfer == 'KV' else 'tokens'}"] for line in reported]
    assert sum(moved) > 0
    assert [line["samples/migrated"] for line in reported] == moved, "and nothing by the other way"
    assert all(line["fusion/threshold"] == 5 and line["fusion/pool"] == 1 for line in reported)
    assert all(len(line["workers"].split(",")) == 1 for line in coordinated.events("pool-formed") if line["workers"])
    assert len(coordinated.events("pool-dissolved")) == 3
    scorers = {worker.name for worker in workers.workers if worker.scored}
    assert scorers == {f"generation-{index}" for index in range(4)}
    if transfer == "KV":
        arrived = [starts for worker in workers.workers for starts in worker.decoded.values()]
        assert any(start > 0 for starts in arrived for start in starts), "a moved sample is decoded on, not anew"


async def test_without_inference_workers_and_without_fusion_scoring_follows_generation(
    jobs: StartedJobs, tmp_path: Path
) -> None:
    coordinated, workers = begin(jobs, tmp_path, {"mode": "Disabled"}, inference={"replicas": 0})
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    assert all(line["samples/migrated"] == 0 for line in coordinated.lines)


async def test_released_workers_share_the_queue_of_inference_workers(jobs: StartedJobs, tmp_path: Path) -> None:
    pace = Pace(tokens_per_tick=1, score_seconds=0.01)
    coordinated, workers = begin(jobs, tmp_path, fixed(6, 1), pace, batch=32, inference={"replicas": 1})
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    assert len(workers["inference-0"].scored) > 0
    assert sum(len(worker.scored) for worker in workers.workers) == 3 * 3 * 32, "every task once"
    assert sum(len(workers[f"generation-{index}"].scored) for index in range(4)) > 0


async def test_auto_measures_once_and_fuses_by_plans_alone(jobs: StartedJobs, tmp_path: Path) -> None:
    pace = Pace(tokens_per_tick=1, score_seconds=0.05)  # a plan exists before an iteration ends
    settings = {"mode": "Auto"}
    coordinated, workers = begin(jobs, tmp_path, settings, pace, batch=32, iterations=4, inference={"replicas": 0})
    await coordinated.until("Generating", 2, SECONDS)
    measured = [workers[f"generation-{index}"].measures for index in range(4)]
    assert set(measured) <= {0, 2}, "two roles; one that still starts is not waited for"
    assert 2 in measured
    await coordinated.cancel()
    run = coordinated.start()
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert [workers[f"generation-{index}"].measures for index in range(4)] == measured, "costs are written down"
    assert run.state.fusion.lengths.samples > 2 * 32, "and lengths remembered, of the segments that are kept"
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    written = json.loads((run.journal.folder / "job.json").read_text())[JOB_KEY]["costs"]
    assert StageCosts.from_document(written) == run.state.fusion.costs, "and what was learned since"
    reported = coordinated.lines
    assert any(line["fusion/threshold"] > 0 for line in reported)
    planned = [line for line in reported if "fusion/predicted_seconds" in line]
    assert planned, "an iteration that ends before its plan is there has none, but one that fuses has"
    assert all(line["fusion/predicted_seconds"] <= line["fusion/predicted_off_seconds"] for line in planned)
    assert all(line in planned for line in reported if line["fusion/threshold"] > 0)


async def test_workers_that_cannot_measure_leave_the_job_as_it_was(jobs: StartedJobs, tmp_path: Path) -> None:
    def fail(index: int, order: pb.Measure) -> pb.Failure | None:
        return pb.Failure(reason="OutOfMemory", message="no room") if order.role and index == 2 else None

    coordinated, workers = begin(jobs, tmp_path, {"mode": "Auto"}, Pace(fail_measure=fail))
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    (said,) = coordinated.events("fusion-off")
    assert "generation-2 could not measure what generation costs: no room" in said["message"]
    assert coordinated.run is not None
    counted = coordinated.run.totals.out_of_memory
    assert set(counted) == {Group.GENERATION}, "this has a metric"


@pytest.mark.parametrize("fault", ["refused", "unheard"])
async def test_a_migration_that_fails_is_made_up_for_by_tokens(jobs: StartedJobs, tmp_path: Path, fault: str) -> None:
    rng = random.Random(4)
    pace = Pace(tokens_per_tick=1, transfer_seconds=0.02, fail_migrate=lambda *_: fault if rng.random() < 0.5 else None)
    # One sample in two iterations moves by its tokens, because most end first; of twelve some do.
    coordinated, workers = begin(jobs, tmp_path, fixed(10, 1, "KV"), pace, batch=24, iterations=12)
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    assert sum(line["fusion/stayed"] for line in coordinated.lines) > 0
    assert sum(line["fusion/moved_tokens"] for line in coordinated.lines) > 0


async def test_a_source_that_waits_for_its_receipt_is_not_told_to_stop(jobs: StartedJobs, tmp_path: Path) -> None:
    """Check a late receipt: the destination reports first, and the source's last tokens follow, before any score."""
    pace = Pace(tokens_per_tick=1, transfer_seconds=0.02, receipt_seconds=0.05, score_seconds=0.1)
    coordinated, workers = begin(jobs, tmp_path, fixed(10, 1, "KV"), pace, batch=24, iterations=2)
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    reported = coordinated.lines
    assert [line["fusion/stayed"] + line["fusion/moved_tokens"] for line in reported] == [0, 0]
    assert [line["fusion/moved_kv"] for line in reported] == [line["samples/migrated"] for line in reported]
    assert sum(line["fusion/moved_kv"] for line in reported) > 0


@pytest.mark.parametrize("seed", range(4))
async def test_whoever_dies_while_samples_move_the_weights_are_the_same(
    jobs: StartedJobs, tmp_path: Path, seed: int
) -> None:
    """Kill sources, destinations, coordinators and sessions during a migration."""
    rng = random.Random(seed)
    hits: list[str] = []

    def strike(source: str, sample: pb.MigrateSample) -> str | None:
        if len(hits) < 6 and rng.random() < 0.4:
            kind = rng.choice(["source", "destination", "session", "coordinator"])
            hits.append(kind)
            if kind == "source":
                workers[source].kill()
            elif kind == "session":
                workers[source].drop_session()
            elif kind == "destination":
                workers[f"generation-{rng.randrange(4)}"].kill()
        return rng.choice([None, None, "refused", "unheard"])

    pace = Pace(tokens_per_tick=1, transfer_seconds=0.02, fail_migrate=strike, score_seconds=0.002)
    coordinated, workers = begin(
        jobs, tmp_path, fixed(12, 2, "KV"), pace, batch=24, iterations=5, inference={"replicas": 0}
    )
    restarts, run = 0, coordinated.run
    while run is not None and not run.over.is_set():
        await asyncio.sleep(0.01)
        if hits.count("coordinator") > restarts:
            restarts += 1
            await coordinated.cancel()
            run = coordinated.start()
    ended = await coordinated.outcome(SECONDS)
    assert ended.phase == "Complete", (hits, ended.failure)
    await workers.end()
    assert hits
    assert workers["training-0"].weights == expected_weights(coordinated.job), hits


async def test_scoring_moves_to_generation_workers_when_the_inference_workers_leave(
    jobs: StartedJobs, tmp_path: Path
) -> None:
    coordinated, workers = begin(jobs, tmp_path, {"mode": "Disabled"}, iterations=4, inference={"replicas": 1})
    await coordinated.until("Generating", 1, SECONDS)
    async with aio_channel(coordinated.address, None) as channel:
        await CoordinatorStub(channel).Resize(pb.ResizeRequest(replicas={"inference": 0}))
    (leaving,) = [worker for worker in workers.workers if worker.group is Group.INFERENCE]
    leaving.leave()
    assert (await coordinated.outcome(SECONDS)).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job)
    assert {worker.name for worker in workers.workers if worker.scored} > {"inference-0"}
