"""Folders of tables, from the datasets library or as shards; ambiguous ones are rejected."""

import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from rlhf_api.job.rollout import Prompts
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage import table_reader
from rlhf_coordinator.storage.prompt_places import Place
from rlhf_coordinator.storage.prompt_records import content_digest, places, read_records
from rlhf_coordinator.storage.table_folder import tables_of
from rlhf_coordinator.storage.table_reader import BadTableError, TableRequest


def saved(folder: Path, shards: list[list[str]], names: list[str] | None = None) -> Path:
    """Return a folder in the format of `Dataset.save_to_disk`: Arrow streams, and a state that lists them."""
    folder.mkdir()
    names = names or [f"data-{n:05}-of-{len(shards):05}.arrow" for n in range(len(shards))]
    for name, prompts in zip(names, shards, strict=True):
        stream(folder / name, prompts)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def stream(path: Path, prompts: list[str]) -> None:
    table = pa.table({"prompt": prompts, "level": list(range(len(prompts)))})
    with pa.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


def parquet(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        pq.write_table(pa.table({"prompt": [name]}), folder / name)
    return folder


def rows(path: Path) -> list[str]:
    return list(table_reader.rows(TableRequest(str(path), {"prompt": "prompts.promptKey"}, all_columns=False)))


def test_a_saved_data_set_is_read_in_the_order_of_its_state(tmp_path: Path) -> None:
    folder = saved(tmp_path / "set", [["a", "b"], ["c"]], names=["second.arrow", "first.arrow"])
    prompts = Prompts(path=str(folder))
    ((file, whole),) = places(prompts)
    read = list(read_records(prompts, file, whole))
    assert [(row.number, row.data["prompt"]) for row in read] == [(1, "a"), (2, "b"), (3, "c")]
    assert str(read[2].place) == f"{folder}/first.arrow row 1"
    before = content_digest(whole)
    stream(folder / "first.arrow", ["d"])
    assert content_digest(whole) != before


@pytest.mark.parametrize("whole_file", [False, True])
def test_both_formats_of_arrow_are_read_in_parts_that_are_checked(tmp_path: Path, whole_file: bool) -> None:
    prompts = [f"p{n}" for n in range(250)]
    path = tmp_path / "a.arrow"
    if whole_file:
        table = pa.table({"prompt": prompts})
        with pa.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    else:
        stream(path, prompts)
    assert [json.loads(row) for row in rows(path)] == [{"prompt": prompt} for prompt in prompts]
    data = path.read_bytes()
    for damaged in (data[:-1], data[: len(data) // 2], b""):
        path.write_bytes(damaged)
        with pytest.raises(BadTableError):
            rows(path)


def test_an_arrow_file_whose_strings_lie_outside_of_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    stream(path, ["abc", "def"])
    offsets, beyond = struct.pack("<3i", 0, 3, 6), struct.pack("<3i", 0, 3, 1 << 30)
    assert path.read_bytes().count(offsets) == 1
    path.write_bytes(path.read_bytes().replace(offsets, beyond))
    with pytest.raises(BadTableError, match="cannot be read as a table"):
        rows(path)


def test_shards_are_read_by_name(tmp_path: Path) -> None:
    names = [f"train-{n:05}-of-00011.parquet" for n in range(11)]
    folder = parquet(tmp_path / "set", *reversed(names))
    (folder / "README.md").write_text("not a table")
    assert [path.name for path in tables_of(Place(folder))] == names


def _nothing(folder: Path) -> None:
    (folder / "README.md").write_text("")


def _splits(folder: Path) -> None:
    (folder / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    (folder / "test").mkdir()
    (folder / "train").mkdir()


def _state(data: Any) -> Any:
    return lambda folder: (folder / "state.json").write_text(data if isinstance(data, str) else json.dumps(data))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_nothing, "has 0 parquet or Arrow files; it needs 1 to "),
        (_splits, "is a folder of several sets (test, train); give the path of one of them"),
        (lambda folder: parquet(folder, "a.parquet", "b.arrow"), "has .arrow and .parquet files"),
        (
            lambda folder: parquet(folder, "test-00000-of-00001.parquet", "train-00000-of-00001.parquet"),
            "has files of several sets (test, train)",
        ),
        (
            lambda folder: parquet(folder, "extra.parquet", "train-00000-of-00001.parquet"),
            "has files of several sets (train, extra.parquet)",
        ),
        (lambda folder: parquet(folder, "train-00001-of-00003.parquet"), "has 1 of 3 parts of 'train'; some are miss"),
        (_state("{"), "has a state.json that save_to_disk did not write"),
        (_state({"_data_files": 3}), "has a state.json that save_to_disk did not write"),
        (
            _state({"_data_files": [{"filename": "../a.arrow"}]}),
            "has a state.json that lists '../a.arrow', which",
        ),
        (_state({"_data_files": [{"filename": "a.arrow"}]}), "lacks a.arrow, which its state.json lists"),
    ],
)
def test_a_folder_that_is_no_single_whole_set_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    make(folder)
    with pytest.raises(JobError) as error:
        tables_of(Place(folder))
    assert error.value.failure.exit_code == ExitCode.BAD_DATA
    assert error.value.failure.message.startswith(f"{folder} {message}")
