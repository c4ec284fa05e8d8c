"""A damaged model folder is an error that names the field, the path and the damage; nothing is loaded partially."""

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.model_folders.models import write_policy, write_reward_model

from rlhf_common.model_files.companion_files import TEXT
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.models.loading import (
    HUB_FILES,
    NOT_FROM_HUB,
    load_backbone_with_value_head,
    load_causal_lm,
    load_sequence_classifier,
    load_tokenizer,
    model_folder,
    replace_weights,
)

FIELD = "spec.models.actor.path"
HOW: dict[str, Any] = {
    "field": FIELD,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "attention": "eager",
}
Damage = Callable[[Path], object]


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def missing_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00002.safetensors"}}))


@pytest.mark.parametrize(
    ("damage", "reason", "words"),
    [
        (truncate, "ModelCorrupt", "model.safetensors is truncated or damaged"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x01"), "ModelCorrupt", "truncated or damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "ModelMissing", "it holds no model.safetensors"),
        (missing_shard, "ModelMissing", "it holds no model-00002.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "ModelMissing", "it holds no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "ModelCorrupt", "config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "ModelCorrupt", "names no model_type"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "nonesuch"}'),
            "ModelCorrupt",
            "model type `nonesuch`",
        ),
        (
            change_tensors(lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")),
            "ModelCorrupt",
            "model.layers.1.mlp.up_proj.weight is missing",
        ),
        (
            change_tensors(lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)})),
            "ModelCorrupt",
            "model.norm.weight has shape [7], config.json needs [32]",
        ),
    ],
)
def test_damage_is_named(damage: Damage, reason: str, words: str, tmp_path: Path) -> None:
    folder = write_policy(tmp_path / "policy")
    damage(folder)
    with pytest.raises(WorkError) as raised:
        load_causal_lm(str(folder), **HOW)
    failure = raised.value.failure
    assert (failure.reason, failure.field, failure.exit_code) == (reason, FIELD, ExitCode.BAD_MODEL)
    assert failure.message.startswith(f"{FIELD}: {folder}: ")
    assert words in failure.message


def test_a_path_that_is_no_folder_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path / "nowhere", "there is no such folder"), (tmp_path / "file", "it is a file")):
        with pytest.raises(WorkError, match=words) as raised:
            model_folder(str(path), FIELD)
        assert raised.value.failure.reason == "ModelMissing"


def test_every_text_file_of_a_checkpoint_is_downloaded() -> None:
    names = [f"{place}some{suffix}" for suffix in TEXT for place in ("", "additional/")]
    for name in names:
        assert any(fnmatch(name, pattern) for pattern in HUB_FILES), name
        assert not any(fnmatch(name, pattern) for pattern in NOT_FROM_HUB), name


def test_a_tokenizer_is_asked_for_by_name(tmp_path: Path) -> None:
    folder = write_policy(tmp_path / "policy")
    assert load_tokenizer(str(folder), FIELD).decode([3, 4]) == "01"
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(WorkError, match="its tokenizer does not load"):
        load_tokenizer(str(folder), FIELD)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(WorkError, match="it holds no tokenizer"):
        load_tokenizer(str(folder), FIELD)


def test_a_value_model_keeps_the_folders_names_and_starts_at_zero_without_a_head(tmp_path: Path) -> None:
    folder = write_policy(tmp_path / "policy")
    model = load_backbone_with_value_head(str(folder), **HOW)
    ids = torch.tensor([[3, 4, 5]])
    assert model(ids).tolist() == [[0.0, 0.0, 0.0]]
    names = set(load_file(folder / "model.safetensors")) - {"lm_head.weight"}
    assert set(dict(model.named_parameters())) == names | {"value_head.weight"}
    change_tensors(lambda tensors: tensors.update({"value_head.weight": torch.ones(1, 32)}))(folder)
    model = load_backbone_with_value_head(str(folder), **HOW)
    hidden = model.backbone(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(model(ids), hidden.sum(-1))
    change_tensors(lambda tensors: tensors.update({"value_head.weight": torch.ones(1, 31)}))(folder)
    with pytest.raises(WorkError, match=r"value_head.weight has shape \[1, 31\], the model needs \[1, 32\]"):
        load_backbone_with_value_head(str(folder), **HOW)


def test_a_reward_model_has_one_output(tmp_path: Path) -> None:
    reward = write_reward_model(tmp_path / "reward")
    model = load_sequence_classifier(str(reward), **HOW)
    assert model(input_ids=torch.tensor([[3, 4, 5]])).logits.shape == (1, 1)
    with pytest.raises(WorkError, match=r"score.weight is missing"):
        load_sequence_classifier(str(write_policy(tmp_path / "policy")), **HOW)
    with pytest.raises(WorkError, match="has 2 outputs"):
        load_sequence_classifier(str(write_reward_model(tmp_path / "two", num_labels=2)), **HOW)


def test_tied_weights_may_come_under_one_name_or_equal_under_both(tmp_path: Path) -> None:
    model = load_causal_lm(str(write_policy(tmp_path / "policy", "qwen3")), **HOW)
    tied = {name: tensor + 1 for name, tensor in model.named_parameters()}
    assert "lm_head.weight" not in tied
    replace_weights(model, tied, subject="actor version 1")
    assert torch.equal(model.lm_head.weight, tied["model.embed_tokens.weight"])
    both = {**tied, "lm_head.weight": tied["model.embed_tokens.weight"].clone()}
    replace_weights(model, both, subject="actor version 1")
    with pytest.raises(WorkError, match="to which the model ties it"):
        replace_weights(model, {**both, "lm_head.weight": both["lm_head.weight"] + 1}, subject="actor version 2")
