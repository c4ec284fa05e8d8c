"""A model's folder in a checkpoint matches its config.json: type, head, files; no bit is lost."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.model_folders import models
from tests.support.training.training_ranks import (
    Alone,
    assert_bitwise,
    exhaust,
    make_batch,
    make_job,
    run,
    serial,
    trainer_of,
)

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_coordinator.storage import checkpoint as checkpoints
from rlhf_workers.models.loading import load_backbone_with_value_head
from rlhf_workers.training.checkpoints import checkpoint
from rlhf_workers.training.checkpoints.source_files import read_source_files, write_source_files
from rlhf_workers.training.trainer import Trainer

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
IDS = torch.tensor([[3, 4, 5, 6]])


def stored_as(folder: Path, name: str | None, **config: Any) -> Path:
    """Store a folder's weights in a type, which config.json names; None means bfloat16 without a name in
    config.json."""
    tensors = load_file(folder / "model.safetensors")
    dtype = TYPES[name or "bfloat16"]
    save_file({key: value.to(dtype) for key, value in tensors.items()}, folder / "model.safetensors")
    content = {**json.loads((folder / "config.json").read_text()), **config}
    content.pop("dtype")
    (folder / "config.json").write_text(json.dumps(content | ({"dtype": name} if name else {})))
    return folder


def saved(job: RLHFJob, path: Path, *, critic: Path, train: bool = True) -> tuple[checkpoints.Checkpoint, Trainer]:
    """Return a checkpoint of a job with one rank, as ranks and coordinator make it."""
    table = serial(job, 1, 1)
    trainer = trainer_of(job, table, 0, 1, Alone())
    if train:
        exhaust(trainer.train(0, make_batch()))
    folder = checkpoints.prepare(path, 1)
    files = checkpoint.save(trainer, folder, 1)
    files += write_source_files(folder, read_source_files(job, trainer.layout, ""))
    paths = {"actor": job.spec.models.actor.path, "critic": str(critic)}
    sources = {role: checkpoints.SourceFolder(path, f"spec.models.{role}.path") for role, path in paths.items()}
    return checkpoints.finish(folder, path, 1, [pb.CheckpointResult(files=files)], sources, {}), trainer


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    ("stored", "field", "written"),
    [
        ("bfloat16", "Model", "bfloat16"),
        ("float16", "Model", "float16"),
        ("float32", "Model", "float32"),
        (None, "Model", "bfloat16"),
        ("bfloat16", "Float32", "float32"),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_config_and_files_name_one_type_and_training_goes_on_bit_by_bit(
    family: str, stored: str | None, field: str, written: str, tmp_path: Path
) -> None:
    folder = stored_as(models.write_policy(tmp_path / "model", family), stored)
    job = make_job(folder, folder, checkpoints={"path": str(tmp_path), "dtype": field})
    written_checkpoint, trainer = saved(job, tmp_path / "checkpoints", critic=folder)
    assert json.loads((written_checkpoint.folder / "actor/config.json").read_text())["dtype"] == written
    tensors = load_file(written_checkpoint.folder / "actor/model.safetensors")
    assert {value.dtype for value in tensors.values()} == {TYPES[written]}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(written_checkpoint.folder / "actor")
    assert loaded.dtype == TYPES[written]
    assert (written_checkpoint.folder / "masters").is_dir() == (written != "float32")
    again = trainer_of(job, serial(job, 1, 1), 0, 1, Alone(), str(written_checkpoint.folder), 1)
    assert_bitwise([trainer], [again])
    ours, theirs = (exhaust(each.train(1, make_batch(seed=1))) for each in (trainer, again))
    assert ours == theirs
    assert_bitwise([trainer], [again])


def test_a_resumed_job_may_save_in_another_type(tmp_path: Path) -> None:
    folder = stored_as(models.write_policy(tmp_path / "model"), "bfloat16")
    job = make_job(folder, folder, checkpoints={"path": str(tmp_path), "dtype": "Float32"})
    written_checkpoint, _ = saved(job, tmp_path / "checkpoints", critic=folder)
    job = make_job(folder, folder, checkpoints={"path": str(tmp_path)})
    again = trainer_of(job, serial(job, 1, 1), 0, 1, Alone(), str(written_checkpoint.folder), 1)
    checkpoint.save(again, tmp_path / "saved", 2)
    files = read_source_files(job, again.layout, str(written_checkpoint.folder))
    assert json.loads(files["actor"]["config.json"])["dtype"] == "bfloat16"
    assert load_file(tmp_path / "saved/actor/model-stage-00000.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_another_number_of_stages_goes_on_from_float32(tmp_path: Path) -> None:
    folder = stored_as(models.write_policy(tmp_path / "model", "qwen2"), "bfloat16")
    job = make_job(folder, folder)
    two_stages, _, _ = run(job, range(1), save=tmp_path / "saved")
    for model in ("actor", "critic"):
        (tmp_path / "saved" / model / "config.json").write_text((folder / "config.json").read_text())
    one_stage, _, _ = run(job, range(1, 1), pipeline=1, restore=str(tmp_path / "saved"))
    assert_bitwise(one_stage, two_stages)


def test_a_checkpoint_of_the_version_before_is_read(tmp_path: Path) -> None:
    folder = stored_as(models.write_policy(tmp_path / "model"), "bfloat16")
    job = make_job(folder, folder, checkpoints={"path": str(tmp_path), "dtype": "Float32"})
    written_checkpoint, trainer = saved(job, tmp_path / "checkpoints", critic=folder)
    for model in ("actor", "critic"):  # float32 under a config.json that says bfloat16, and a head of another name
        (written_checkpoint.folder / model / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(written_checkpoint.folder / "critic/model.safetensors")
    tensors["value_head.weight"] = tensors.pop("score.weight")
    save_file(tensors, written_checkpoint.folder / "critic/model.safetensors")
    assert_bitwise([trainer], [trainer_of(job, serial(job, 1, 1), 0, 1, Alone(), str(written_checkpoint.folder), 1)])


@pytest.mark.full(quick=2)
@pytest.mark.parametrize("start", ["policy", "reward"])
@pytest.mark.parametrize("family", models.ARCHITECTURES)
def test_transformers_loads_a_critic_with_the_head_that_was_trained(family: str, start: str, tmp_path: Path) -> None:
    policy = models.write_policy(tmp_path / "policy", family)
    critic = policy if start == "policy" else models.write_reward_model(tmp_path / "critic", family)
    written_checkpoint, _ = saved(make_job(policy, critic), tmp_path / "checkpoints", critic=critic)
    loaded, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        written_checkpoint.folder / "critic", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.num_labels == 1
    ours = load_backbone_with_value_head(
        str(written_checkpoint.folder / "critic"),
        field="critic",
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention="eager",
    )
    assert float(ours.value_head.weight.abs().sum()) > 0
    assert torch.equal(loaded.score.weight, ours.value_head.weight)
    torch.testing.assert_close(loaded(input_ids=IDS).logits[0, 0], ours(IDS)[0, -1])


def test_peft_loads_a_critic_with_the_head_that_was_trained(tmp_path: Path) -> None:
    policy = models.write_policy(tmp_path / "policy")
    job = make_job(policy, policy, training={"lora": {"rank": 2, "alpha": 4}})
    written_checkpoint, trainer = saved(job, tmp_path / "checkpoints", critic=policy)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    adapted = peft.PeftModel.from_pretrained(base, str(written_checkpoint.folder / "critic"))
    assert adapted.peft_config["default"].task_type == "SEQ_CLS"
    head = adapted.base_model.model.score.modules_to_save["default"].weight
    assert torch.equal(head, trainer.stages["critic", 0].get_parameter("value_head.weight"))


def test_a_weight_beyond_float16_is_named_with_the_field(tmp_path: Path) -> None:
    folder = stored_as(models.write_policy(tmp_path / "model"), "float16")
    job = make_job(folder, folder)
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    with torch.no_grad():
        next(iter(trainer.stages["actor", 0].parameters()))[0, 0] = 1e6
    with pytest.raises(Exception, match=r"spec.checkpoints.dtype: a weight is 1e\+06, beyond float16: use Float32"):
        checkpoint.save(trainer, tmp_path / "saved", 1)
    assert not [file.name for file in (tmp_path / "saved").rglob("*.tmp")]
