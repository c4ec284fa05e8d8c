"""For a model given by hub id, the ranks that loaded it write the other files of its checkpoint."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from tests.support.model_folders import models
from tests.support.training.training_ranks import ThreadCommunicator, make_job, serial
from tests.support.training.training_roles import MadeBatches
from tests.support.workers.outbox import RecordedOutbox
from transformers import AutoConfig, AutoTokenizer

from rlhf_api.algorithms.roles import ModelRole
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_coordinator.model_sizes import read_sizes
from rlhf_coordinator.storage import checkpoint
from rlhf_workers.training.backends.torch_backend import TorchBackend, build_trainer
from rlhf_workers.training.checkpoints.source_files import read_source_files
from rlhf_workers.training.training_role import SpanBuffer, TrainingRole

HUB_ID = "team/tiny-policy"
COMMIT = "5" * 40


def cache_model(hub: Path, hub_id: str = HUB_ID) -> Path:
    """Create a local hub cache in huggingface_hub's layout, with one model in it; return its snapshot."""
    repository = hub / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return models.write_policy(repository / "snapshots" / COMMIT, "qwen2", seed=1)


@pytest.fixture
def workers_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the cache of the workers' machine, without a network."""
    hub = tmp_path / "workers" / "hub"
    cache_model(hub)
    use_cache(monkeypatch, hub)
    return hub


def use_cache(monkeypatch: pytest.MonkeyPatch, hub: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def rank_of(job: RLHFJob, become: pb.BecomeTraining) -> TrainingRole:
    spans = SpanBuffer()
    peers = ThreadCommunicator.__new__(ThreadCommunicator)
    trainer = build_trainer(job, become, torch.device("cpu"), lambda layout: peers, spans)
    files = read_source_files(job, trainer.layout, become.checkpoint)
    return TrainingRole(job, TorchBackend(trainer, files), MadeBatches(), become.version, spans)


def save(role: TrainingRole, folder: Path) -> list[pb.CheckpointFile]:
    outbox = RecordedOutbox()
    role.handle(pb.Command(id=1, save_checkpoint=pb.SaveCheckpoint(folder=str(folder), iteration=0)), outbox)
    assert not outbox.answers[0].HasField("failure")
    return list(outbox.answers[0].checkpoint.files)


def first_checkpoint(tmp_path: Path) -> tuple[RLHFJob, pb.BecomeTraining, Path, Path]:
    """Return a job of two hub models, its single rank's order, the path of its checkpoints, and the first folder."""
    job, path = make_job(Path(HUB_ID), Path(HUB_ID)), tmp_path / "checkpoints"
    become = pb.BecomeTraining(world_size=1, schedule=serial(job, 1, 1).model_dump_json())
    return job, become, path, checkpoint.prepare(path, 1)


def finish(path: Path, version: int, folder: Path, files: list[pb.CheckpointFile]) -> checkpoint.Checkpoint:
    """Finish the checkpoint like the coordinator."""
    sources = {role: checkpoint.SourceFolder(HUB_ID, f"spec.models.{role}.path") for role in ("actor", "critic")}
    return checkpoint.finish(folder, path, version, [pb.CheckpointResult(files=files)], sources, {})


def test_a_checkpoint_of_a_hub_model_is_whole_where_the_coordinator_has_no_cache(
    workers_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, become, path, folder = first_checkpoint(tmp_path)
    files = save(rank_of(job, become), folder)

    use_cache(monkeypatch, tmp_path / "coordinator")
    finished = finish(path, 1, folder, files)
    assert checkpoint.verify(finished.folder) is None
    assert AutoTokenizer.from_pretrained(finished.folder / "actor")("12+3").input_ids == [4, 5, 39, 6]
    assert AutoConfig.from_pretrained(finished.folder / "actor").model_type == "qwen2"
    assert (finished.folder / "critic" / "tokenizer.json").is_file()


def test_a_rank_that_came_from_a_checkpoint_writes_it_again_when_that_is_gone(
    workers_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, become, path, folder = first_checkpoint(tmp_path)
    files = save(rank_of(job, become), folder)
    finished = finish(path, 1, folder, files)

    shutil.rmtree(workers_cache)  # another pod, with a cache of its own
    become.checkpoint = str(finished.folder)
    role = rank_of(job, become)
    shutil.rmtree(finished.folder)  # spec.checkpoints.keep
    folder = checkpoint.prepare(path, 2)
    finished = finish(path, 2, folder, save(role, folder))
    assert AutoTokenizer.from_pretrained(finished.folder / "actor")("12+3").input_ids == [4, 5, 39, 6]


def test_a_hub_model_in_the_cache_has_a_known_size(workers_cache: Path, tmp_path: Path) -> None:
    size = read_sizes(make_job(Path(HUB_ID)).spec)[ModelRole.ACTOR]
    assert size is not None
    assert size.parameters > 1000
    assert read_sizes(make_job(Path("team/unknown")).spec)[ModelRole.ACTOR] is None


def load_tokenizer(hub_home: Path) -> subprocess.CompletedProcess[str]:
    """Load the tokenizer in a separate process, because the library reads its variables at import."""
    code = f"""
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.prompts import load_tokenizer
try:
    print(load_tokenizer({HUB_ID!r})("12+3")["input_ids"])
except JobError as error:
    print(error.failure.reason, error.failure.field, error.failure.message)
"""
    env = os.environ | {"HF_HOME": str(hub_home), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)


@pytest.mark.full
def test_the_coordinator_tokenizes_by_a_cache_and_says_how_to_give_it_one(tmp_path: Path) -> None:
    cache_model(tmp_path / "home" / "hub")
    assert load_tokenizer(tmp_path / "home").stdout == "[4, 5, 39, 6]\n"
    stdout = load_tokenizer(tmp_path / "empty").stdout
    assert stdout.startswith(f"ModelMissing spec.models.actor.path {HUB_ID}: it is no folder here")
    assert "set HF_HOME in spec.training.template to a folder with the model on a volume" in stdout
