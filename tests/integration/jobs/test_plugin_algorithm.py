"""An algorithm from outside the project trains in a real local run: the tutorial's, from its file."""

import json
import shutil
from pathlib import Path

import pytest
from tests.support.algorithms import REINFORCE
from tests.support.jobs.chaos import Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import write_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ITERATIONS = 12
SEED = 4
LINES = 60
"""Largest number of lines of the plug-in: an algorithm is little code."""


def test_reinforce_as_a_plugin_learns_and_a_killed_rank_changes_no_bit(tmp_path: Path) -> None:
    assert len(REINFORCE.read_text().splitlines()) < LINES
    manifest = write_job(tmp_path, algorithm="plugin", iterations=ITERATIONS, batch=32, every=3)
    first = run_job(manifest, tmp_path / "first")
    kills = Kills(SEED, 1, ["training-1"], in_phases=("Training",), iterations_between=4)
    killed = run_job(manifest, tmp_path / "killed", kills=kills)
    assert_same_weights(killed, first)
    lines = first.lines
    baselines = [line["training/reinforce/baseline"] for line in lines]
    rewards = [line["reward"] for line in lines]
    assert baselines[0] == pytest.approx(rewards[0], abs=1e-6)
    assert baselines[1] == pytest.approx(0.8 * baselines[0] + 0.2 * rewards[1], abs=1e-6)
    assert sum(rewards[-3:]) > sum(rewards[:3]), rewards
    assert all(line["training/gradient_norm/actor"] > 0 for line in lines)
    newest = max((tmp_path / "killed" / "checkpoints").glob("iteration-*"))
    state = json.loads((newest / "trainer.json").read_text())
    assert state["algorithm"]["baseline"] == pytest.approx(baselines[-1], abs=1e-6)


def test_a_mistake_in_a_plugin_ends_the_job_and_names_the_line(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, algorithm="plugin", iterations=2)
    shutil.copy(REINFORCE, tmp_path / "mine.py")
    code = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(code.replace("* log_p, None", "@ log_p, None"))
    ended = run_job(manifest, tmp_path / "run", settings=(f"algorithm.plugin.file={tmp_path / 'mine.py'}",), code=20)
    assert "spec.algorithm.plugin" in ended.output
    assert "Reinforce.policy_loss" in ended.output
