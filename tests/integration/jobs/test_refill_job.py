"""A real job that drops prompts without a learning signal: others replace them.

The weights are the same with its tail consolidated and its processes killed.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from tests.support.jobs.chaos import Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import HELD, edited_spec, write_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ITERATIONS = 4
REWARD = f'''{HELD}
@held
def score(prompt, response, record):
    """Right or wrong: many prompts have responses that are all the one, or all the other."""
    return float(any(character.isdigit() for character in response[:4]))
'''
FUSED = ("fusion.interStage={mode: Fixed, threshold: 10, pool: 1, transfer: Tokens}",)
OUTCOME = ("iteration", "reward", "tokens", "groups/dropped", "groups/refilled", "groups/rounds", "groups/missing")


def write_refilled_job(folder: Path, **fields: object) -> Path:
    manifest = write_job(folder, algorithm="dapo", iterations=ITERATIONS, every=2)
    (folder / "reward.py").write_text(REWARD)
    with edited_spec(manifest) as spec:
        spec["algorithm"]["dapo"] |= fields
        spec["samples"] = {"every": 1, "perIteration": 0}
    return manifest


def test_groups_that_teach_nothing_are_replaced_and_deaths_and_moves_change_no_bit(tmp_path: Path) -> None:
    manifest = write_refilled_job(tmp_path)
    calm = run_job(manifest, tmp_path / "calm")
    kills = Kills(7, 3, (), first=("coordinator", "generation-1", "coordinator"), longest_calm_seconds=0.4)
    killed = run_job(manifest, tmp_path / "killed", settings=FUSED, kills=kills)
    assert_same_weights(killed, calm)
    lines = calm.reported(*OUTCOME)
    assert lines == killed.reported(*OUTCOME)
    assert sum(line["groups/dropped"] for line in lines) >= 2, "or there was nothing to refill"
    assert all(line["groups/refilled"] == line["groups/dropped"] for line in lines)
    assert not any(line["groups/missing"] for line in lines)
    for iteration in range(ITERATIONS):
        rows = calm.read(f"samples/iteration-{iteration:06d}.jsonl").splitlines()
        rewards, trained = defaultdict(set), set()
        for row in map(json.loads, rows):
            rewards[row["group"]].add(row["reward"])
            trained |= {row["group"]} if row["advantage"] is not None else set()
        assert trained == {group for group, members in rewards.items() if len(members) > 1}, (
            "what was trained on differs"
        )
        assert len(trained) == 4
    assert "prompt groups are dropped, as their rewards are all equal" in calm.read("events.jsonl")


def test_a_batch_that_cannot_be_filled_is_masked_out_and_says_so(tmp_path: Path) -> None:
    manifest = write_refilled_job(tmp_path, refillRounds=1)
    (tmp_path / "reward.py").write_text("def score(prompt, response, record):\n    return 1.0\n")
    masked = run_job(manifest, tmp_path / "masked", settings=("iterations=1",))
    (line,) = masked.lines
    assert (line["groups/dropped"], line["groups/refilled"], line["groups/missing"]) == (8, 4, 4)
    assert "4 places of the batch are masked out" in masked.read("events.jsonl")
