"""Shared siblings over real gRPC with simulated workers: despite kills the shared tokens are right and change no
result.
"""

from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import Coordinated, StartedJobs, expected_weights, make_job, make_prompts
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_results import response
from tests.support.coordinator.simulated_worker import SimulatedWorker

from rlhf_common.arrays import unpack
from rlhf_coordinator.storage.prompts import random_key

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

ITERATIONS = 7
"""Iterations of 4 prompts each, with 11 prompts: the last iterations repeat prompts."""


async def test_siblings_reach_who_decodes_their_prompt_and_change_nothing(jobs: StartedJobs, tmp_path: Path) -> None:
    rollout = {"batchSize": 16, "maxResponseTokens": 200}
    job = make_job(tmp_path, algorithm="grpo", iterations=ITERATIONS, rollout=rollout)
    coordinated, workers = jobs.begin(job, tmp_path, Pace(tokens_per_tick=2))
    learners = [worker for worker in workers.workers if worker.name.startswith("generation")]
    for worker in learners:
        worker.learns_siblings = True
    await coordinated.until("Generating", 2)
    learners[0].drop_session()
    await coordinated.until("Generating", 3)
    await coordinated.cancel()
    run = coordinated.start()
    assert (await coordinated.outcome(120.0)).phase == "Complete"
    await workers.end()
    assert workers["training-0"].weights == expected_weights(coordinated.job, make_prompts(coordinated.job))
    for worker in learners:
        assert_true_tokens(coordinated, worker)
    messages = [message for worker in learners for message in worker.siblings]
    earlier = [delta for message in messages for delta in message.deltas if delta.iteration < message.iteration]
    assert earlier, "the second epoch is drafted by the first"
    assert run.totals.siblings_sent > 0


def assert_true_tokens(coordinated: Coordinated, worker: SimulatedWorker) -> None:
    """Assert that a worker's sibling tokens are those of the samples' random keys, wherever they were decoded."""
    assert worker.siblings
    for message in worker.siblings:
        for delta in message.deltas:
            tokens = unpack(delta.tokens)
            key = random_key(coordinated.job.spec.seed, delta.iteration, delta.sample)
            expected, _ = response(key, delta.offset, delta.offset + len(tokens))
            assert tokens.tobytes() == expected
            assert 0 < delta.weight <= 1
