"""A job that carries cut-off samples into its next iteration, in real local runs.

Processes are killed, and one run resumes without its journal. Responses are long enough that many of them are cut off.
"""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs.chaos import Kills, run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.sample_table import SampleRow, read_table, table_files

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ITERATIONS, BATCH, SIBLINGS, MORE = 24, 16, 4, 2
PROMPTS = 40
"""Lines of the prompt file."""
SEED = 11
"""Seed of the moments of kills."""
FIELDS = (
    "deterministic=false",
    f"rollout.oversample={MORE}",
    "rollout.maxStaleness=2",
    "prompts.shuffle=false",
    "samples={every: 1, perIteration: 64}",
    "checkpoints={path: kept, every: 4}",
)


def job(folder: Path) -> Path:
    return write_job(folder, algorithm="grpo", iterations=ITERATIONS, batch=BATCH, responses=160, learning_rate=4e-3)


def rows_of(run: Path) -> list[SampleRow]:
    return [row for path in table_files(run).values() for row in read_table(path)]


def assert_trained_once_or_on_the_way(rows: list[SampleRow]) -> None:
    """Assert that all started prompts, in the order of the file, are present once, except for the last cut-off ones."""
    begun = Counter(number % PROMPTS + 1 for number in range(ITERATIONS * BATCH // SIBLINGS + MORE))
    trained = Counter(row.line for row in rows)
    assert all(count % SIBLINGS == 0 for count in trained.values()), trained
    prompts = Counter({line: count // SIBLINGS for line, count in trained.items()})
    assert not prompts - begun
    assert (begun - prompts).total() == MORE
    assert Counter(row.iteration for row in rows) == dict.fromkeys(range(ITERATIONS), BATCH)


def assert_carried(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        assert line["samples/cut"] == MORE * SIBLINGS
        assert line["samples/carried"] + line["samples/restarted"] == (MORE * SIBLINGS if line["iteration"] else 0)
        assert 0 <= line["staleness/mean"] <= line["staleness/max"] <= 2
        assert line["samples/failed"] == line["samples/abstained"] == 0
        assert line["training/actor/mismatch_max"] < 1e-3, "of what the trained weights drew"
    assert sum(line["tokens_carried"] for line in lines) > 0
    assert max(line["staleness/max"] for line in lines) >= 1


def assert_spans_rise(rows: list[SampleRow]) -> None:
    """Assert that some responses continued with the next weights, and that every span has an allowed version."""
    for row in rows:
        versions = [version for version, _ in row.weight_versions]
        assert versions == sorted(set(versions)), row.weight_versions
        assert row.iteration - 2 <= versions[0] <= versions[-1] <= row.iteration
        assert sum(tokens for _, tokens in row.weight_versions) == row.response_tokens
    assert any(len(row.weight_versions) > 1 for row in rows)


def test_what_is_cut_off_is_trained_on_once_whoever_is_killed_and_the_reward_rises(tmp_path: Path) -> None:
    among = ["generation-1", "coordinator", "training-1"]
    kills = Kills(SEED, 4, among, first=(*among, "coordinator"), longest_calm_seconds=0.5, iterations_between=3)
    lines = run_job(job(tmp_path), tmp_path / "run", settings=FIELDS, kills=kills).lines
    rows = rows_of(tmp_path / "run")
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
    assert_carried(lines)
    assert_spans_rise(rows)
    assert_trained_once_or_on_the_way(rows)
    first, last = (sum(line["reward"] for line in part) / len(part) for part in (lines[:4], lines[-4:]))
    assert last > first + 0.05, [line["reward"] for line in lines]


def test_a_job_whose_journal_is_gone_takes_up_what_its_checkpoint_carries(tmp_path: Path) -> None:
    manifest, run = job(tmp_path), tmp_path / "run"
    stopped = run_job(manifest, run, settings=FIELDS, interrupt_after=7, code=None)
    closed = len(stopped.lines)
    assert 7 <= closed < ITERATIONS, str(stopped)
    shutil.rmtree(run / "journal")
    lines = run_job(manifest, run, settings=FIELDS, options=["--resume"]).lines
    rows = rows_of(run)
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
    assert lines[closed]["tokens_carried"] > 0, "the first iteration of the new journal"
    assert_carried(lines)
    assert_spans_rise(rows)
    assert_trained_once_or_on_the_way(rows)
