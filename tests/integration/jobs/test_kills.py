"""A real job whose every process is killed at a random moment trains the same weights as an undisturbed one."""

import json
import random
from pathlib import Path

import pytest
from tests.support.jobs.chaos import Ended, Kills, run_job
from tests.support.jobs.local_job import PROCESSES, write_job

ITERATIONS = 20
BATCH = 16
SEED = 20
"""Seed of the victims' order and moments; printed with every kill when the test fails."""


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def said(ended: Ended) -> str:
    return f"seed {SEED}, kills {ended.kills}\n{ended.output[-4000:]}"


@pytest.mark.timeout(1800)
def test_every_process_killed_once_and_the_weights_are_the_same(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=ITERATIONS)
    undisturbed = run_job(manifest, tmp_path / "undisturbed")
    assert undisturbed.code == 0, said(undisturbed)
    first = list(PROCESSES)
    random.Random(SEED).shuffle(first)
    kills = Kills(SEED, len(first), PROCESSES, first=tuple(first), longest_calm_seconds=0.5, iterations_between=1)
    # Executed: a forked run, which shares the hash seed with others, is compared with one that is not forked.
    killed = run_job(manifest, tmp_path / "killed", kills=kills, executed=True)
    assert killed.code == 0, said(killed)
    assert len(killed.kills) == len(first), said(killed)
    assert killed.weights == undisturbed.weights != "", said(killed)
    both = [metrics(tmp_path / name) for name in ("undisturbed", "killed")]
    assert [line["iteration"] for line in both[1]] == list(range(ITERATIONS))
    for calm, disturbed in zip(*both, strict=True):
        assert disturbed["reward"] == calm["reward"]
        assert disturbed["tokens"] == calm["tokens"]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_scoring_after_generation_gives_the_same_rewards_and_weights_as_scoring_beside_it(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=3, algorithm="grpo")
    beside = run_job(manifest, tmp_path / "beside", options=["--set", "spec.inference.overlap=Enabled"])
    after = run_job(manifest, tmp_path / "after", options=["--set", "spec.inference.overlap=Disabled"])
    assert (beside.code, after.code) == (0, 0), said(beside) + said(after)
    assert beside.weights == after.weights != ""
    rewards = [[line["reward"] for line in metrics(tmp_path / name)] for name in ("beside", "after")]
    assert rewards[0] == rewards[1]
    assert len(rewards[0]) == 3
