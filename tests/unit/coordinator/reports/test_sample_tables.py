"""Sample tables: rows with any text survive their file; files are complete, bounded, and belong to this run."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.coordinator.sample_rows import sample_row

from rlhf_api.job.samples import SampleSelection
from rlhf_coordinator.reports.sample_table import (
    MAX_LINE_BYTES,
    MAX_TEXT_CHARACTERS,
    best_first,
    cut_text,
    line_of,
    read_table,
    table_files,
    visible,
)
from rlhf_coordinator.reports.trackers.sample_tables import SampleTables

ROW = sample_row()
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(ANY_TEXT, ANY_TEXT, st.none() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_line_is_plain_ascii_and_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, response: str, reward: float | None
) -> None:
    row = replace(ROW, prompt=prompt, response=response, reward=reward)
    line = line_of(row)
    assert re.fullmatch(r"[ -~]*", line)
    path = tmp_path_factory.mktemp("rows") / "table.jsonl"
    path.write_text(line + "\n")
    assert list(read_table(path)) == [row]


@settings(max_examples=10, deadline=None)
@given(st.characters(exclude_categories=["Cs"]), st.characters(exclude_categories=["Cs"]))
@example("\U0010ffff", "\U0001f600")
def test_a_row_with_texts_of_the_maximum_length_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, response: str
) -> None:
    texts = [cut_text(letter * (MAX_TEXT_CHARACTERS + 1)) for letter in (prompt, response)]
    row = replace(ROW, prompt=texts[0], response=texts[1], cut=True)
    path = tmp_path_factory.mktemp("rows") / "table.jsonl"
    path.write_text(line_of(row) + "\n")
    assert list(read_table(path)) == [row]


@given(ANY_TEXT)
def test_what_is_visible_holds_nothing_that_a_terminal_acts_on(text: str) -> None:
    shown = visible(text)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]", shown)
    assert visible("\x1b[31mred\x1b]0;title\x07") == "\\x1b[31mred\\x1b]0;title\\x07"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "Invalid JSON"),
        ("[1]", "table"),
        (line_of(ROW).replace('"sample": 3', '"sample": "3"'), "sample: "),
        (line_of(ROW).replace('"sample": 3, ', ""), "sample: "),
        (line_of(replace(ROW, prompt="x" * MAX_LINE_BYTES)), "longer than"),
    ],
)
def test_a_line_that_is_no_row_is_an_error_with_its_number(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "table.jsonl"
    path.write_text(line_of(ROW) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"table\.jsonl line 2 .*{problem}"):
        list(read_table(path))


def test_a_text_is_cut_and_a_number_that_json_lacks_is_null(tmp_path: Path) -> None:
    assert len(cut_text("x" * 10 * MAX_TEXT_CHARACTERS)) == MAX_TEXT_CHARACTERS
    assert '"reward": null' in line_of(replace(ROW, reward=float("nan")))


def test_the_best_come_first_and_who_was_not_judged_is_left_out() -> None:
    rows = [replace(ROW, sample=n, reward=reward) for n, reward in enumerate([1.0, None, 3.0, 1.0])]
    assert [row.sample for row in best_first(rows)] == [2, 0, 3]


def test_tables_of_iterations_that_are_done_again_go_and_the_oldest_make_room(tmp_path: Path) -> None:
    tables = SampleTables(tmp_path, 0)
    for iteration in range(4):
        tables.samples(iteration, [replace(ROW, iteration=iteration)])
    again = SampleTables(tmp_path, 3, max_bytes=3 * len(line_of(ROW)) + 3)
    assert list(table_files(tmp_path)) == [0, 1, 2]
    again.samples(3, [ROW])
    assert list(table_files(tmp_path)) == [1, 2, 3]
    again.samples(4, [ROW] * 9)
    assert list(table_files(tmp_path)) == [4], "the newest stays, however large it is"


@pytest.mark.parametrize(
    ("fields", "due", "chosen"),
    [
        (SampleSelection(), [0, 10, 20, 24], [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30]),
        (SampleSelection(every=7, per_iteration=3), [0, 7, 14, 21, 24], [0, 10, 21]),
        (SampleSelection(per_iteration=0), [0, 10, 20, 24], list(range(32))),
        (SampleSelection(per_iteration=99), [0, 10, 20, 24], list(range(32))),
        (SampleSelection(mode="Disabled"), [], None),
    ],
)
def test_which_iterations_have_a_table_and_of_which_samples(
    fields: SampleSelection, due: list[int], chosen: list[int] | None
) -> None:
    assert [iteration for iteration in range(25) if fields.due(iteration, 25)] == due
    assert chosen is None or fields.chosen(32) == chosen
