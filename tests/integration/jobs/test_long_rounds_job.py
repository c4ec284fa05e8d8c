"""A deterministic job whose cut-off prompts come back in long rounds, in real local runs with kills and a resume."""

import shutil
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest
from tests.support.jobs.chaos import Ended, Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.sample_table import read_table, table_files

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

BATCH, SIBLINGS, MORE = 16, 4, 2
ITERATIONS = 6
"""Two periods of two short rounds and a long one."""
LONG = [0, 0, 1, 0, 0, 1]
WAITING = [2, 4, 0, 2, 4, 0]
SEED = 12
"""Seed of the moments of kills."""
FIELDS = (
    f"rollout.oversample={MORE}",
    "rollout.cutBy=Counts",
    "rollout.longRounds=Enabled",
    "prompts.shuffle=false",
    "samples={every: 1, perIteration: 64}",
)
UNEVEN = "generation.engine=tests.support.jobs.uneven_engines"


def job(folder: Path) -> Path:
    return write_job(folder, algorithm="grpo", iterations=ITERATIONS, batch=BATCH, responses=48)


def assert_rounds(run: Ended) -> None:
    """Assert the kinds of the rounds, and that each prompt of the file was trained on once with all its responses."""
    assert [line["rollout/long_round"] for line in run.lines] == LONG, str(run)
    assert [line["prompts/waiting"] for line in run.lines] == WAITING
    assert [line["samples/cut"] for line in run.lines] == [(1 - long) * MORE * SIBLINGS for long in LONG]
    rows = [row for path in table_files(run.run_dir).values() for row in read_table(path)]
    prompts = LONG.count(0) * (BATCH // SIBLINGS + MORE)
    assert Counter(row.line for row in rows) == dict.fromkeys(range(1, prompts + 1), SIBLINGS)
    assert run.summary["prompts_waiting"] == 0
    for period in (run.lines[:3], run.lines[3:]):
        *short, long = (line["response_tokens_mean"] for line in period)
        assert fmean(short) < long, "a long round trains on the responses that short rounds of its period cut off"


def test_kills_in_short_and_long_rounds_and_between_them_change_no_weight(tmp_path: Path) -> None:
    manifest = job(tmp_path)
    undisturbed = run_job(manifest, tmp_path / "undisturbed", settings=FIELDS)
    assert_rounds(undisturbed)
    victims, phases = ("generation-1", "coordinator", "generation-0", "training-1"), ("Generating", "Training") * 2
    kills = Kills(SEED, len(victims), victims, first=victims, in_phases=phases)
    killed = run_job(manifest, tmp_path / "killed", settings=(*FIELDS, UNEVEN), kills=kills)
    assert_rounds(killed)
    assert_same_weights(killed, undisturbed)


def test_drafts_from_cut_samples_change_no_weight_through_kills(tmp_path: Path) -> None:
    manifest = job(tmp_path)
    nothing = run_job(manifest, tmp_path / "nothing", settings=FIELDS)
    victims = ("coordinator", "generation-0")
    kills = Kills(SEED, len(victims), victims, first=victims, in_phases=("Training", "Generating"))
    drafting = ("rollout.keepCut=Drafts", "generation.speculation={mode: Fixed, drafters: [Siblings]}")
    drafts = run_job(manifest, tmp_path / "drafts", settings=(*FIELDS, *drafting), kills=kills)
    assert_rounds(drafts)
    assert_same_weights(drafts, nothing)
    stored = [line["rollout/draft_tokens_kept"] for line in drafts.lines]
    assert max(stored) > 0, "short rounds keep what they cut off"
    assert all(tokens == 0 for tokens, long in zip(stored, LONG, strict=True) if long), "long rounds use it up"
    assert any(line["speculation/acceptance"] > 0 for line in drafts.lines if line["rollout/long_round"])


def test_a_job_whose_journal_is_gone_takes_up_the_waiting_prompts_of_its_checkpoint(tmp_path: Path) -> None:
    manifest, run = job(tmp_path), tmp_path / "run"
    settings = (*FIELDS, "checkpoints={path: kept, every: 1}")
    stopped = run_job(manifest, run, settings=settings, interrupt_after=1, code=None)
    assert 1 <= len(stopped.lines) < ITERATIONS, str(stopped)
    shutil.rmtree(run / "journal")
    assert_rounds(run_job(manifest, run, settings=settings, options=["--resume"]))
