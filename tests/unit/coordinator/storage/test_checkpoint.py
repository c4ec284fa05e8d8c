"""Checkpoint folders are complete or absent, and found again; damaged ones are skipped."""

import json
import re
from pathlib import Path

import pytest
from tests.support.workers.checkpoint_folders import make_checkpoint, part

from rlhf_common import control_pb2 as pb
from rlhf_common.model_files import companion_files
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage import checkpoint


def test_a_checkpoint_is_a_hugging_face_folder_and_says_what_it_holds(tmp_path: Path) -> None:
    saved = make_checkpoint(tmp_path, 10)
    assert saved.folder.name == "iteration-000010"
    index = json.loads((saved.folder / "actor" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["q1"] == "model-stage-00001.safetensors"
    assert (saved.folder / "actor" / "tokenizer.json").read_text() == "tokenizer.json"
    assert not (saved.folder / "actor" / "model.safetensors").exists()
    assert not (saved.folder / "actor" / "pytorch_model.bin").exists()
    facts = json.loads((saved.folder / "checkpoint.json").read_text())
    assert (facts["version"], facts["iteration"], facts["seed"]) == (10, 9, 5)
    files = {str(item.relative_to(saved.folder)) for item in saved.folder.rglob("*") if item.is_file()}
    assert set(facts["files"]) == files - {"checkpoint.json"}
    assert checkpoint.verify(saved.folder) is None
    assert [item.name for item in (tmp_path / "checkpoints").iterdir()] == ["iteration-000010"]


def test_one_stage_writes_the_usual_single_file(tmp_path: Path) -> None:
    saved = make_checkpoint(tmp_path, 1, stages=1)
    assert (saved.folder / "actor" / "model.safetensors").read_bytes() == bytes(9)
    assert not (saved.folder / "actor" / "model.safetensors.index.json").exists()
    assert checkpoint.verify(saved.folder) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "facts", "infinite", "nested", "unreadable"])
def test_the_newest_whole_one_is_found_and_a_damaged_one_named(tmp_path: Path, damage: str) -> None:
    make_checkpoint(tmp_path, 1)
    newest = make_checkpoint(tmp_path, 2).folder
    victim = newest / "optimizer" / "stage-1.safetensors"
    if damage == "flip":
        victim.write_bytes(b"mOments")
    elif damage == "cut":
        victim.write_bytes(b"mome")
    elif damage == "remove":
        victim.unlink()
    elif damage == "unreadable":
        victim.unlink()
        victim.symlink_to("/proc/self/mem")  # a regular file of 0 bytes whose read fails, as on a broken disk
        file = newest / "checkpoint.json"
        facts = json.loads(file.read_text())
        facts["files"]["optimizer/stage-1.safetensors"]["bytes"] = 0
        file.write_text(json.dumps(facts))
    else:
        victim = newest / "checkpoint.json"
        text = victim.read_text()
        infinite = text.replace('"bytes": ', '"bytes": 1e999, "was": ')
        victim.write_text({"facts": text[:40], "infinite": infinite, "nested": "[" * 100_000}[damage])
    result, problems = checkpoint.discover(tmp_path / "checkpoints")
    assert result is not None
    assert result.version == 1
    (problem,) = problems
    assert str(newest) in problem
    assert victim.name in problem


def test_a_folder_of_checkpoints_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"the folder of checkpoints cannot be read at .*: File name too long") as error:
        checkpoint.discover(tmp_path / ("x" * 300))
    assert (error.value.failure.field, error.value.failure.exit_code) == (checkpoint.FIELD, ExitCode.STORAGE)


def test_a_file_that_is_not_what_its_rank_wrote_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    temporary = checkpoint.prepare(path, 3)
    file = part(temporary, "trainer.json", b"{}")
    (temporary / "trainer.json").write_bytes(b"[]")
    with pytest.raises(JobError, match=r"trainer.json has another SHA-256") as error:
        checkpoint.finish(temporary, path, 3, [pb.CheckpointResult(files=[file])], {}, {})
    assert error.value.failure.exit_code == ExitCode.STORAGE
    assert checkpoint.versions(path) == []


def test_pruning_keeps_the_newest_and_what_is_ahead_takes_no_place(tmp_path: Path) -> None:
    for version in (1, 2, 3, 9):
        make_checkpoint(tmp_path, version)
    path = tmp_path / "checkpoints"
    assert checkpoint.prune(path, 3, 2) == [3, 2]
    assert checkpoint.versions(path) == [9, 3, 2]


def test_a_damaged_one_is_replaced_in_its_turn(tmp_path: Path) -> None:
    (make_checkpoint(tmp_path, 2).folder / "optimizer" / "stage-0.safetensors").unlink()
    assert checkpoint.verify(make_checkpoint(tmp_path, 2).folder) is None
    checkpoint.prepare(tmp_path / "checkpoints", 5)
    (tmp_path / "checkpoints" / ".tmp-best.json").write_bytes(b"{")  # its writer died
    checkpoint.remove_leftovers(tmp_path / "checkpoints")
    assert [item.name for item in (tmp_path / "checkpoints").iterdir()] == ["iteration-000002"]


def test_an_unusable_source_folder_is_refused_by_its_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, temporary = tmp_path / "judge", checkpoint.prepare(tmp_path / "checkpoints", 1)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(companion_files, "MAX_BYTES", 1)
    file = part(temporary, "reward/model-stage-00000.safetensors", b"weights", "reward", ("a",))
    sources = {"reward": checkpoint.SourceFolder(str(folder), "spec.models.reward.model.path")}
    with pytest.raises(JobError, match=re.escape(str(folder))) as error:
        checkpoint.finish(temporary, tmp_path / "checkpoints", 1, [pb.CheckpointResult(files=[file])], sources, {})
    assert error.value.failure.field == "spec.models.reward.model.path"
    assert error.value.failure.exit_code == ExitCode.BAD_MODEL
