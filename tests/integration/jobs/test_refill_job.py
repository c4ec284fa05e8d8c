"""A real job that drops prompts without a learning signal: others replace them.

The weights are the same with its tail consolidated and its processes killed.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.jobs.chaos import Ended, Kills, run_job
from tests.support.jobs.local_job import HELD, write_job

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ITERATIONS = 4
REWARD = f'''{HELD}
@held
def score(prompt, response, record):
    """Right or wrong: many prompts have responses that are all the one, or all the other."""
    return float(any(character.isdigit() for character in response[:4]))
'''
FUSED = ("mode=Fixed", "threshold=10", "pool=1", "transfer=Tokens")


def said(*runs: Ended) -> str:
    return "\n".join(f"kills {run.kills}\n{run.output[-3000:]}" for run in runs)


def outcome(run_dir: Path) -> list[dict[str, Any]]:
    names = ("iteration", "reward", "tokens", "groups/dropped", "groups/refilled", "groups/rounds", "groups/missing")
    return [{name: line[name] for name in names} for line in read_metrics(run_dir / "metrics.jsonl")]


def write_refilled_job(folder: Path, **fields: object) -> Path:
    manifest = write_job(folder, algorithm="dapo", iterations=ITERATIONS, every=2)
    (folder / "reward.py").write_text(REWARD)
    job = yaml.safe_load(manifest.read_text())
    job["spec"]["algorithm"]["dapo"] |= fields
    job["spec"]["samples"] = {"every": 1, "perIteration": 0}
    manifest.write_text(yaml.safe_dump(job, sort_keys=False))
    return manifest


def test_groups_that_teach_nothing_are_replaced_and_deaths_and_moves_change_no_bit(tmp_path: Path) -> None:
    manifest = write_refilled_job(tmp_path)
    calm = run_job(manifest, tmp_path / "calm")
    assert calm.code == 0, said(calm)
    kills = Kills(7, 3, (), first=("coordinator", "generation-1", "coordinator"), longest_calm_seconds=0.4)
    options = [word for setting in FUSED for word in ("--set", f"spec.fusion.interStage.{setting}")]
    killed = run_job(manifest, tmp_path / "killed", options=options, kills=kills)
    assert killed.code == 0, said(killed)
    assert len(killed.kills) == 3, said(killed)
    assert calm.weights == killed.weights != "", said(killed)
    lines = outcome(tmp_path / "calm")
    assert lines == outcome(tmp_path / "killed")
    assert sum(line["groups/dropped"] for line in lines) >= 2, "or there was nothing to refill"
    assert all(line["groups/refilled"] == line["groups/dropped"] for line in lines)
    assert not any(line["groups/missing"] for line in lines)
    for iteration in range(ITERATIONS):
        rows = (tmp_path / "calm" / "samples" / f"iteration-{iteration:06d}.jsonl").read_text().splitlines()
        rewards, trained = defaultdict(set), set()
        for row in map(json.loads, rows):
            rewards[row["group"]].add(row["reward"])
            trained |= {row["group"]} if row["advantage"] is not None else set()
        assert trained == {group for group, members in rewards.items() if len(members) > 1}, (
            "what was trained on differs"
        )
        assert len(trained) == 4
    events = (tmp_path / "calm" / "events.jsonl").read_text()
    assert "prompt groups are dropped, as their rewards are all equal" in events


def test_a_batch_that_cannot_be_filled_is_masked_out_and_says_so(tmp_path: Path) -> None:
    manifest = write_refilled_job(tmp_path, refillRounds=1)
    (tmp_path / "reward.py").write_text("def score(prompt, response, record):\n    return 1.0\n")
    masked = run_job(manifest, tmp_path / "masked", options=["--set", "spec.iterations=1"])
    assert masked.code == 0, said(masked)
    (line,) = outcome(tmp_path / "masked")
    assert (line["groups/dropped"], line["groups/refilled"], line["groups/missing"]) == (8, 4, 4)
    assert "4 places of the batch are masked out" in (tmp_path / "masked" / "events.jsonl").read_text()
