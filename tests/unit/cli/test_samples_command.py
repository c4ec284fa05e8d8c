"""`rlhf samples`: output of sample tables; their text cannot control the terminal."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
from tests.support.coordinator.sample_rows import sample_row

from rlhf_cli.local.errors import RunError
from rlhf_cli.samples import SampleChoice, show_samples
from rlhf_coordinator.reports.trackers.sample_tables import SampleTables

ROW = sample_row()
HOSTILE = "\x1b]0;owned\x07[red]bold[/red]\x9b2J\u202edetrever\r\n\x7f"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tables = SampleTables(tmp_path, 0)
    tables.samples(0, [replace(ROW, iteration=0, sample=0, response="first")])
    rewards = [0.5, None, 2.0, -1.0]
    rows = [replace(ROW, sample=n, reward=reward, response=f"answer {n}") for n, reward in enumerate(rewards)]
    tables.samples(2, [*rows, replace(ROW, sample=9, reward=0.1, prompt=HOSTILE, response=HOSTILE)])
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], run_dir: Path, choice: SampleChoice, *, as_json: bool = False) -> str:
    assert show_samples(run_dir, choice, as_json=as_json, parquet=None) == 0
    return capsys.readouterr().out


def test_the_newest_table_is_shown_or_the_one_asked_for(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = shown(capsys, run_dir, SampleChoice())
    assert "answer 0" in newest
    assert "generation-1 (+1)" in newest
    assert "first" in shown(capsys, run_dir, SampleChoice(iteration=0))


def test_the_best_and_the_worst_come_in_their_order(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, run_dir, SampleChoice(best=2, worst=1))
    places = [text.index(f"answer {number}") for number in (2, 0, 3)]
    assert places == sorted(places)
    assert "answer 1" not in text, "nothing judged it"


@pytest.mark.parametrize("choice", [SampleChoice(), SampleChoice(sample=9)])
@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_in_a_text_acts_on_the_terminal(
    run_dir: Path, capsys: pytest.CaptureFixture[str], choice: SampleChoice, as_json: bool
) -> None:
    text = shown(capsys, run_dir, choice, as_json=as_json)
    assert "[red]bold[/red]" in text, "it is no markup"
    assert not set(text) & set("\x1b\x07\x9b\u202e\r\x7f")


def test_one_sample_is_shown_whole(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, run_dir, SampleChoice(sample=2))
    for part in ("reward     2", "advantage  -0.25", "generation-0, generation-1 (moved)", "1 of 4 tokens accepted"):
        assert part in text


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (SampleChoice(iteration=1), r"--iteration 1: .* iterations 0, 2"),
        (SampleChoice(sample=5), r"--sample 5: the table has samples 0, 1, 2, 3, 9"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(run_dir: Path, choice: SampleChoice, message: str) -> None:
    with pytest.raises(RunError, match=message):
        show_samples(run_dir, choice, as_json=False, parquet=None)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (None, r"its job\.json does not say"),
        ('{"spec": {"samples": {"mode": "Disabled"}}}', r"its spec\.samples\.mode is Disabled"),
        ('{"spec": {"samples": {"mode": "Enabled"}}}', r"no iteration .* is finished"),
    ],
)
def test_a_run_without_tables_says_why(tmp_path: Path, job: str | None, message: str) -> None:
    (tmp_path / "metrics.jsonl").touch()
    if job is not None:
        (tmp_path / "job.json").write_text(job)
    with pytest.raises(RunError, match=message):
        show_samples(tmp_path, SampleChoice(), as_json=False, parquet=None)


def test_where_there_is_no_run_the_runs_that_there_are_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny" / "journal").mkdir(parents=True)
    with pytest.raises(RunError, match=r"RUN tyni: there is no such folder; the newest runs here are runs/tiny$"):
        show_samples(Path("tyni"), SampleChoice(), as_json=False, parquet=None)


def test_a_table_of_another_version_or_without_rows_is_a_message(tmp_path: Path) -> None:
    table = tmp_path / "samples" / "iteration-000000.jsonl"
    table.parent.mkdir()
    table.write_text('{"iteration": 0}\n')
    with pytest.raises(RunError, match=r"line 1 is no row .* are read by the rlhf of that version"):
        show_samples(tmp_path, SampleChoice(), as_json=False, parquet=None)
    table.write_text("")
    with pytest.raises(RunError, match="its tables have no rows"):
        show_samples(tmp_path, SampleChoice(), as_json=False, parquet=tmp_path / "all.parquet")


def test_without_a_run_one_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="give a run folder"):
        show_samples(None, SampleChoice(), as_json=False, parquet=None)


def test_all_tables_become_one_parquet_file(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_dir / "all.parquet"
    assert show_samples(run_dir, SampleChoice(), as_json=False, parquet=path) == 0
    records = pyarrow.parquet.read_table(path).to_pylist()
    assert [record["sample"] for record in records] == [0, 0, 1, 2, 3, 9]
    assert records[-1]["response"] == HOSTILE
    assert records[0]["weight_versions"] == [{"version": 2, "tokens": 2}]
    assert records[2]["reward"] is None
