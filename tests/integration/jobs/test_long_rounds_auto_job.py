"""A job that chooses its long rounds, in real local runs: a kill and a resume keep each prompt trained on once."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from tests.support.jobs.chaos import Ended, Kills, run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.sample_table import read_table, table_files

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

BATCH, SIBLINGS, ITERATIONS = 16, 2, 10
LINES = 40
"""Prompts of the file; the job passes over them twice."""
FIELDS = (
    "deterministic=false",
    "rollout.longRounds=Auto",
    f"algorithm.grpo.groupSize={SIBLINGS}",
    "prompts.shuffle=false",
    "samples={every: 1, perIteration: 64}",
    "generation.engine=tests.support.jobs.uneven_engines",
)
"""Decoding takes most of an iteration, so that its tail is worth a choice."""


def job(folder: Path) -> Path:
    return write_job(folder, algorithm="grpo", iterations=ITERATIONS, batch=BATCH, responses=200)


def assert_each_prompt_once(run: Ended) -> None:
    rows = [row for path in table_files(run.run_dir).values() for row in read_table(path)]
    assert Counter(row.line for row in rows) == dict.fromkeys(range(1, LINES + 1), 2 * SIBLINGS)
    assert run.lines[-1]["prompts/waiting"] == 0
    assert run.summary["prompts_waiting"] == 0


def choices(run: Ended) -> list[str]:
    events = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    return [event["surplus"] for event in events if event["kind"] == "long-rounds-choice"]


def test_a_job_with_a_long_tail_takes_long_rounds_through_kills(tmp_path: Path) -> None:
    victims = ("coordinator", "generation-0", "coordinator")
    kills = Kills(5, len(victims), victims, first=victims, in_phases=("Generating", "Training", "Generating"))
    run = run_job(job(tmp_path), tmp_path / "run", settings=FIELDS, kills=kills)
    assert_each_prompt_once(run)
    assert any(int(surplus) > 0 for surplus in choices(run)), str(run)
    assert any(line["rollout/long_round"] for line in run.lines), str(run)
    short = [line for line in run.lines if line["rollout/surplus_prompts"] and not line["rollout/long_round"]]
    assert all(line["samples/cut"] == line["rollout/surplus_prompts"] * SIBLINGS for line in short)


def test_a_job_whose_journal_is_gone_continues_the_schedule_of_its_checkpoint(tmp_path: Path) -> None:
    manifest, folder = job(tmp_path), tmp_path / "run"
    settings = (*FIELDS, "checkpoints={path: kept, every: 1}")
    stopped = run_job(manifest, folder, settings=settings, interrupt_after=4, code=None)
    assert 4 <= len(stopped.lines) < ITERATIONS, str(stopped)
    before = stopped.lines[-1]
    shutil.rmtree(folder / "journal")
    resumed = run_job(manifest, folder, settings=settings, options=["--resume"])
    assert_each_prompt_once(resumed)
    if before["prompts/waiting"]:
        after = next(line for line in resumed.lines if line["iteration"] == before["iteration"] + 1)
        assert after["rollout/surplus_prompts"] == before["rollout/surplus_prompts"]
