"""A deterministic job with sorted windows over several epochs, in real local runs with kills and a resume."""

import shutil
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest
from tests.support.jobs.chaos import Ended, Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.sample_table import read_table, table_files

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

BATCH, SIBLINGS, WINDOW = 16, 4, 3
EPOCHS = 3
"""Epochs of one window each; the first one is not sorted."""
PROMPTS = WINDOW * BATCH // SIBLINGS
SEED = 12
"""Seed of the moments of kills."""
FIELDS = (f"prompts.lengthWindow={WINDOW}", "samples={every: 1, perIteration: 64}")
UNEVEN = "generation.engine=tests.support.jobs.uneven_engines"


def job(folder: Path) -> Path:
    manifest = write_job(folder, algorithm="grpo", iterations=EPOCHS * WINDOW, batch=BATCH, responses=48)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:PROMPTS]))
    return manifest


def trained_lines(run: Ended) -> list[list[int]]:
    """Return the lines of the prompts of each iteration, in the order of the batch."""
    tables = [read_table(path) for _, path in sorted(table_files(run.run_dir).items())]
    return [[row.line for row in sorted(table, key=lambda row: row.sample)] for table in tables]


def assert_windows(run: Ended) -> None:
    """Assert that each window trains on each prompt of the file once, in batches of like expected lengths."""
    lines = trained_lines(run)
    assert [line["rollout/sorted_batch"] for line in run.lines] == [0.0] * WINDOW + [1.0] * WINDOW * (EPOCHS - 1)
    for first in range(0, EPOCHS * WINDOW, WINDOW):
        window = [line for batch in lines[first : first + WINDOW] for line in batch]
        assert Counter(window) == dict.fromkeys(range(1, PROMPTS + 1), SIBLINGS)
    expected = [line["rollout/expected_tokens_mean"] for line in run.lines[WINDOW:]]
    for first in range(0, len(expected), WINDOW):
        assert len(set(expected[first : first + WINDOW])) == WINDOW, "batches of a window expect different lengths"


def test_kills_in_the_middle_of_windows_change_no_weight(tmp_path: Path) -> None:
    manifest = job(tmp_path)
    undisturbed = run_job(manifest, tmp_path / "undisturbed", settings=FIELDS)
    assert_windows(undisturbed)
    victims, phases = ("generation-1", "coordinator", "coordinator", "training-1"), ("Generating", "Training") * 2
    kills = Kills(SEED, len(victims), victims, first=victims, in_phases=phases, iterations_between=1)
    killed = run_job(manifest, tmp_path / "killed", settings=(*FIELDS, UNEVEN), kills=kills)
    assert_windows(killed)
    assert trained_lines(killed) == trained_lines(undisturbed)
    assert_same_weights(killed, undisturbed)


def test_a_job_whose_journal_is_gone_ends_its_window_with_the_same_weights(tmp_path: Path) -> None:
    manifest, run = job(tmp_path), tmp_path / "run"
    settings = (*FIELDS, "checkpoints={path: run/checkpoints, every: 1}")
    undisturbed = run_job(manifest, tmp_path / "undisturbed", settings=FIELDS)
    stopped = run_job(manifest, run, settings=settings, interrupt_after=WINDOW + 1, code=None)
    assert WINDOW < len(stopped.lines) < EPOCHS * WINDOW, str(stopped)
    shutil.rmtree(run / "journal")
    resumed = run_job(manifest, run, settings=settings, options=["--resume"])
    assert_windows(resumed)
    assert_same_weights(resumed, undisturbed)


def test_without_windows_batches_take_prompts_in_file_order(tmp_path: Path) -> None:
    plain = run_job(job(tmp_path), tmp_path / "plain", settings=("samples={every: 1, perIteration: 64}",))
    sorted_run = run_job(job(tmp_path), tmp_path / "sorted", settings=FIELDS)
    plain_lines, sorted_lines = trained_lines(plain), trained_lines(sorted_run)
    assert plain_lines[:WINDOW] == sorted_lines[:WINDOW], "the first epoch is not sorted"
    assert plain_lines[WINDOW:] != sorted_lines[WINDOW:]
    assert "rollout/sorted_batch" not in plain.lines[0]
    means = [fmean(line["response_tokens_mean"] for line in run.lines[:WINDOW]) for run in (plain, sorted_run)]
    assert means[0] == means[1]
