"""A real job that streams gradients: its processes die while it does, and the weights are those of calm runs."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.jobs.chaos import Ended, Kills, assert_same_weights, run_job, trained
from tests.support.jobs.local_job import edited_spec, write_job

from rlhf_coordinator.storage.journal import Journal

pytestmark = pytest.mark.timeout(1800)

ITERATIONS, GROUPS = 6, 8
STREAM = ("training.stream=Enabled",)
VICTIMS = ("training-1", "coordinator", "training-0")


def write_streaming_job(folder: Path) -> Path:
    """Write a job of eight prompts with four responses each, in one step per iteration, on two data parallel ranks."""
    manifest = write_job(folder, algorithm="grpo", iterations=ITERATIONS, batch=4 * GROUPS)
    with edited_spec(manifest) as changed:
        changed["training"] |= {"parallelism": {"pipeline": 1, "data": 2}, "microBatchSize": 2}
        changed["algorithm"]["grpo"]["miniBatchSize"] = 4 * GROUPS
        changed["generation"]["maxBatchSize"] = 2 * GROUPS
    return manifest


def orders(run: Ended) -> Mapping[int, list[int]]:
    """Return iteration -> prompts whose gradients were ordered before the batch was complete."""
    journal = Journal(run.run_dir / "journal")
    return {
        iteration: [group for record in journal.read(iteration) for group in record.streamed.groups]
        for iteration in journal.iterations()
    }


def streams(run: Ended) -> int:
    return run.read("events.jsonl").count('"gradients-streamed"')


def test_ranks_and_the_coordinator_die_while_gradients_stream_and_the_bits_stay(tmp_path: Path) -> None:
    manifest = write_streaming_job(tmp_path)
    calm = run_job(manifest, tmp_path / "calm", settings=STREAM)
    assert streams(calm) > ITERATIONS // 2
    assert any("training/stream_microbatches" in line for line in calm.lines)
    kills = Kills(39, len(VICTIMS), VICTIMS, first=VICTIMS, at_event="gradients-streamed", iterations_between=1)
    killed = run_job(manifest, tmp_path / "killed", settings=STREAM, kills=kills)
    assert_same_weights(killed, calm)
    assert trained(killed.run_dir) == trained(calm.run_dir), "moments too"
    for run in (calm, killed):
        assert all(order == list(range(len(order))) for order in orders(run).values())
    names = ("training/actor/loss", "training/gradient_norm/actor", "reward")
    assert killed.reported(*names) == calm.reported(*names)
    whole = run_job(manifest, tmp_path / "whole")
    assert streams(whole) == 0
    assert not any("training/stream_microbatches" in line for line in whole.lines)
    for name in names:
        assert calm.lines[0][name] == pytest.approx(whole.lines[0][name], rel=1e-4, abs=1e-6), name
