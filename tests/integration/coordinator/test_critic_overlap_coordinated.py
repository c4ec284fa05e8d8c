"""Critics beside decoding over real gRPC with simulated workers: mode Auto measures both ways, and uses the faster one.

Ranks take a given time for each token, so that the faster way is known.
"""

from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import StartedJobs, expected_weights, make_job
from tests.support.coordinator.simulated_rank import Pace

from rlhf_common import control_pb2 as pb

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

ITERATIONS = 8
PROBE = 2
"""Iteration of the probe: the first iteration of a group is not representative, the second one trains all at once."""
CHOSEN = 4
"""First iteration after the choice: the critics of the probe train beside the iteration after it."""
TOKEN = 2e-4
"""Seconds to train one token, all models."""
SECONDS = {"wins": (TOKEN, TOKEN / 4, TOKEN * 3 / 4), "loses": (TOKEN, TOKEN * 5 / 4, TOKEN)}
"""Case -> seconds per token: all models, policy, others. In "loses", critics would have trained in the policy's
bubbles.
"""


@pytest.mark.parametrize("case", ["wins", "loses"])
async def test_auto_does_what_it_measured_to_be_faster(jobs: StartedJobs, tmp_path: Path, case: str) -> None:
    training = {"parallelism": {"pipeline": 2}, "microBatchSize": 4, "criticOverlap": "Auto"}
    rollout = {"batchSize": 16, "maxResponseTokens": 100}
    job = make_job(tmp_path, iterations=ITERATIONS, every=ITERATIONS, rollout=rollout, training=training)
    coordinated, workers = jobs.begin(job, tmp_path, Pace(tokens_per_tick=1, part_seconds=SECONDS[case]))
    if case == "wins":  # another coordinator continues from the first one's record, in the middle of the probe
        await coordinated.until("Scoring", PROBE)
        await coordinated.cancel()
        coordinated.start()
    assert (await coordinated.outcome()).phase == "Complete"
    await workers.end()
    rank = workers["training-0"]
    assert rank.weights == expected_weights(job)

    apart = {iteration for iteration, part in rank.parts if part == pb.TRAIN_PART_POLICY}
    assert apart == {iteration for iteration, part in rank.parts if part == pb.TRAIN_PART_CRITICS}
    reported = coordinated.lines
    assert apart == {number for number, line in enumerate(reported) if line["critic_overlap/on"]}
    assert min(apart) == PROBE, "one iteration is trained apart to measure it"
    assert ITERATIONS - 1 not in apart, "nothing is decoded beside the critics of the last one"
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "critics are trained beside the next decoding once, to measure it" in events
    gains = [line.get("critic_overlap/predicted_gain_seconds") for line in reported]
    if case == "wins":
        assert ITERATIONS - 2 in apart
        assert reported[ITERATIONS - 2]["critic_overlap/predicted_gain_seconds"] > 0
        assert "trained beside the next decoding: the last iteration would take" in events
    else:
        assert apart == {PROBE}
        assert all(gain is not None and gain < 0 for gain in gains[CHOSEN:-1])
        assert "would take" not in events, "it never switched"
