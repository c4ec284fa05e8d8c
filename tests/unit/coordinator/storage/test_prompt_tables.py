"""Prompts of parquet files: rows become the same records as lines; invalid prompts are rejected by position."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_api.job.rollout import Prompts
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage import prompt_tables, table_reader
from rlhf_coordinator.storage.prompt_records import PromptRecord, places, read_records
from rlhf_coordinator.storage.table_reader import BadTableError, TableRequest

CHAT = [{"role": "user", "content": "Name a planet."}]


def read(path: Path, *response_keys: str, **fields: Any) -> list[PromptRecord]:
    prompts = Prompts(path=str(path), **fields)
    ((file, whole),) = places(prompts)
    return list(read_records(prompts, file, whole, response_keys))


def write(folder: Path, columns: dict[str, Any], **options: Any) -> Path:
    path = folder / "prompts.parquet"
    pq.write_table(pa.table(columns), path, **options)
    return path


def refusal(path: Path, *columns: str) -> str:
    """Return the error that a table's reader reports, in this process."""
    needed = {"prompt": "prompts.promptKey"} | dict.fromkeys(columns, "prompts.columns")
    with pytest.raises(BadTableError) as error:
        list(table_reader.rows(TableRequest(str(path), needed, all_columns=not columns)))
    return f"row {error.value.row} {error.value.problem}" if error.value.row else error.value.problem


def test_rows_are_the_records_that_lines_of_the_same_objects_are(tmp_path: Path) -> None:
    objects = [
        {"prompt": f"say {number} é\n", "chat": CHAT, "score": number / 2, "seen": number % 2 == 0, "words": None}
        for number in range(150)
    ]
    path = write(tmp_path, {name: [record[name] for record in objects] for name in objects[0]}, row_group_size=40)
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in objects))
    rows = read(path)
    assert [(row.number, row.data, row.text) for row in rows] == [
        (line.number, line.data, line.text) for line in read(lines)
    ]
    assert str(rows[99].place) == f"{path} row 100"


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_columns_are_read_by_name_and_others_are_not_looked_at(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, {"id": [1], "question": ["2 + 2?"], "answer": ["4"], "image": [b"\x89PNG"]})
    if kind == "jsonl":
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"image": "x", "answer": "4", "id": 1, "question": "2 + 2?"}')
    (row,) = read(path, "answer", prompt_key="question", columns=["id"])
    assert json.loads(row.text) == row.data == {"question": "2 + 2?", "answer": "4", "id": 1}
    with pytest.raises(JobError) as error:
        read(path, prompt_key="question", columns=["level"])
    failure = error.value.failure
    assert (failure.exit_code, failure.field) == (ExitCode.BAD_DATA, "spec.prompts.path")
    where, term = {"parquet": ("", "column"), "jsonl": (" line 1", "key")}[kind]
    assert failure.message.startswith(f"{path}{where} has no {term} 'level' (prompts.columns); it has i")


def test_only_columns_that_are_read_are_in_the_way_by_their_type(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": ["a"], "image": [b"\x89PNG"]})
    assert (
        refusal(path) == "has binary in column 'image', which is no JSON; name the columns to read with prompts.columns"
    )
    assert list(table_reader.rows(TableRequest(str(path), {"prompt": ""}, all_columns=False))) == ['{"prompt": "a"}']


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"]}, "has no column 'prompt' (prompts.promptKey); it has text"),
        ({"prompt": ["a"], "image": [{"bytes": b"x", "path": "y"}]}, "has binary in column 'image', which is no JSON"),
        ({"prompt": ["a"], "at": pa.array([0], pa.timestamp("us"))}, "has timestamp[us] in column 'at'"),
        ({"prompt": ["a"] * 70, "score": [0.5] * 69 + [float("nan")]}, "row 70 has a value in column 'score' that"),
    ],
)
def test_a_bad_table_is_named(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    assert refusal(write(tmp_path, columns)).startswith(message)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), path)
    assert refusal(path) == "has 2 columns 'prompt'; rename all but one"


def test_a_column_nested_without_end_is_refused(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(table_reader.DEEPEST + 2):
        deep = [deep]
    message = refusal(write(tmp_path, {"prompt": ["a"], "deep": [deep]}))
    assert message.startswith(f"has lists and structs nested deeper than {table_reader.DEEPEST} in column 'deep'")


def test_a_string_that_is_no_text_is_named_by_row_and_column(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"a", b"\xff"], pa.binary()).buffers())
    message = refusal(write(tmp_path, {"prompt": broken}))
    assert message.startswith("row 2 has no text in column 'prompt'")


def test_rows_that_memory_should_not_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_reader, "LARGEST_ROW", 1000)
    path = write(tmp_path, {"prompt": ["a", "b" * 5000]}, compression="none", use_dictionary=False)
    assert refusal(path).endswith("bytes in 2 rows of column 'prompt'; a row has at most 1000")
    repeated = write(tmp_path, {"prompt": ["b" * 5000] * 64})
    assert refusal(repeated).startswith("row 1 and the 63 after it have "), "small in the file, large in memory"
    among_small = write(tmp_path, {"prompt": ["a"] * 63 + ["b" * 5000]})
    assert refusal(among_small) == "row 64 has 5014 characters; a row has at most 1000 bytes"
    monkeypatch.setattr(table_reader, "MOST_ROWS", 63)
    assert refusal(among_small) == "has 64 rows; the most is 63: give a part of it"


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": ["one", "two", "three"] * 9}, write_page_checksum=True, compression="none")
    whole = path.read_bytes()
    assert len(list(table_reader.rows(TableRequest(str(path), {}, all_columns=True)))) == 27
    path.write_bytes(whole.replace(b"three", b"seven", 1))
    assert "CRC" in refusal(path)
    for cut in (0, 4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert refusal(path).startswith("cannot be read")
    path.unlink()
    assert refusal(path).startswith("cannot be read: ")


def test_what_the_name_says_and_what_the_file_is_have_to_agree(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(JobError, match=r"prompts.parquet cannot be read as a table: .*magic bytes"):
        read(path)
    renamed = tmp_path / "prompts.jsonl"
    renamed.write_bytes(write(tmp_path, {"prompt": ["a"]}).read_bytes())
    with pytest.raises(JobError, match=r"is a parquet file by its content; give it a name that ends in .parquet"):
        read(renamed)


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (
            "kill -ABRT $$",
            "after row 0 its reader was ended by SIGABRT: the file is damaged, or needs more memory than",
        ),
        ("""echo 'R{"prompt": "a"}'; exit 3""", "after row 1 its reader ended with exit code 3"),
        ("""echo 'R{"prompt": "a"}'; echo Z2""", "after row 1 its reader ended with exit code 0"),
        ("exec sleep 60", "its reader gave no row for 0 s; is the volume that holds it there?"),
    ],
)
def test_a_reader_that_does_not_come_to_the_last_row_is_an_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, message: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{reader}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(prompt_tables, "SILENCE", 0.2 if "sleep" in reader else 60.0)
    with pytest.raises(JobError) as error:
        read(tmp_path / "prompts.parquet")
    assert message in error.value.failure.message
