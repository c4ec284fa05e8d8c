"""Adapter folders: each key and tensor that may differ from plain LoRA is rejected by its name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rlhf_api.job.lora import EVERY_TARGET, Lora
from rlhf_api.peft_folder_check import (
    ACCEPTED,
    CHANGE_NOTHING,
    AdapterError,
    check_adapter_config,
    check_adapter_tensors,
)
from rlhf_common.model_files.weight_files import FolderError, read_weight_files
from rlhf_common.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS

SETTINGS = Lora.model_validate({"rank": 4, "alpha": 8, "targetModules": ["q_proj", "v_proj"]})
MODULES = [f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ("q_proj", "v_proj")]


def write_config(folder: Path, **changes: Any) -> Path:
    """Write PEFT's own configuration for SETTINGS, with changes of single keys."""
    folder.mkdir(parents=True, exist_ok=True)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    lora.save_pretrained(str(folder))
    file = folder / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def write_tensors(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Write A and B of MODULES, with changes of single tensors; None leaves one out."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor | None] = {}
    for module in MODULES:
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.zeros(4, 16)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(16, 4)
    tensors |= changes
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / ADAPTER_WEIGHTS)
    return folder


def write_base(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"{module}.weight": torch.zeros(16, 16) for module in MODULES}, folder / "model.safetensors")
    return folder


def test_every_known_key_is_one_of_peft() -> None:
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields >= CHANGE_NOTHING
    assert fields >= ACCEPTED.keys()


def test_what_peft_writes_for_plain_adapters_is_taken(tmp_path: Path) -> None:
    check_adapter_config(write_config(tmp_path), SETTINGS)
    everything = Lora.model_validate({"rank": 4, "alpha": 8})
    check_adapter_config(write_config(tmp_path, target_modules="all-linear"), everything)
    check_adapter_config(write_config(tmp_path, target_modules=list(EVERY_TARGET)), everything)
    check_adapter_config(write_config(tmp_path, target_modules=MODULES), SETTINGS)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_dropout": 0.1},
        {"inference_mode": False},
        {"base_model_name_or_path": "somewhere/else"},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": False},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM"}},
        {"qalora_group_size": 32},
        {"a_key_of_tomorrow": None, "and_another": [], "third": {}, "fourth": False, "fifth": ""},
        {"revision": "v2"},
    ],
)
def test_what_changes_nothing_is_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    check_adapter_config(write_config(tmp_path, **changes), SETTINGS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "invented"),
        ("init_lora_weights", 1),
        ("use_dora", True),
        ("use_rslora", True),
        ("use_qalora", True),
        ("lora_bias", True),
        ("bias", "lora_only"),
        ("bias", "all"),
        ("fan_in_fan_out", True),
        ("modules_to_save", ["lm_head"]),
        ("modules_to_save", ["embed_tokens"]),
        ("exclude_modules", ["layers.0.self_attn.q_proj"]),
        ("exclude_modules", ".*layers.0.*"),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("layers_to_transform", [0]),
        ("layers_to_transform", 0),
        ("layers_pattern", "layers"),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("trainable_token_indices", [3]),
        ("trainable_token_indices", {"embed_tokens": [3]}),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("alora_invocation_tokens", [5, 6]),
        ("megatron_config", {"hidden_size": 16}),
        ("loftq_config", {"loftq_bits": 4}),
        ("corda_config", {"corda_method": "kpm"}),
        ("velora_config", {"num_groups": 2}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"num_samples": 8}),
        ("arrow_config", {"top_k": 2}),
        ("use_bdlora", {"nblocks": 2}),
        ("ensure_weight_tying", True),
        ("task_type", "SEQ_CLS"),
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("a_key_of_tomorrow", 0),
        ("a_key_of_tomorrow", "yes"),
        ("target_modules", ".*q_proj|.*v_proj"),
        ("target_modules", ["q_proj", "v_proj", "lm_head"]),
        ("target_modules", ["self_attn.q_proj"]),
        ("target_modules", None),
    ],
)
def test_what_means_something_else_is_refused_by_key_and_value(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(AdapterError) as refused:
        check_adapter_config(write_config(tmp_path, **{key: value}), SETTINGS)
    assert f"{tmp_path / ADAPTER_CONFIG} has {key}" in str(refused.value)
    assert repr(value) in str(refused.value)
    assert "merge_and_unload()" in str(refused.value)
    assert refused.value.field == ""


def test_a_revision_matters_where_the_base_is_fetched(tmp_path: Path) -> None:
    write_config(tmp_path, revision="v2")
    with pytest.raises(AdapterError, match=r"revision: 'v2' of its base, and spec.models.actor.path is 'owner/name'"):
        check_adapter_config(tmp_path, SETTINGS, base_path="owner/name")
    check_adapter_config(write_config(tmp_path, revision="main"), SETTINGS, base_path="owner/name")


@given(
    key=st.sampled_from([field.name for field in dataclasses.fields(peft.LoraConfig)]) | st.text(min_size=1),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
)
def test_any_value_changes_nothing_or_is_refused(
    key: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_config(tmp_path_factory.mktemp("adapter"), **{key: value})
    nothing = value is None or value is False or value in ("", [], {})
    plain = json.loads(write_config(tmp_path_factory.mktemp("plain")).joinpath(ADAPTER_CONFIG).read_text())
    try:
        check_adapter_config(folder, SETTINGS)
    except AdapterError:
        assert key not in CHANGE_NOTHING or key in ("r", "lora_alpha", "target_modules")
    else:
        accepted = any(value is allowed or value == allowed for allowed in ACCEPTED.get(key, ()))
        assert nothing or key in CHANGE_NOTHING or accepted or plain[key] == value


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.lm_head.weight",
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.layers.0.self_attn.q_proj.bias",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)
def test_a_tensor_that_is_no_factor_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    base = read_weight_files(write_base(tmp_path / "base"))
    check_adapter_tensors(write_tensors(tmp_path), SETTINGS, base)
    write_tensors(tmp_path, **{name: torch.zeros(4, 16)})
    with pytest.raises(AdapterError, match="holds " + name.replace(".", r"\.")):
        check_adapter_tensors(tmp_path, SETTINGS, base)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({f"base_model.model.{MODULES[0]}.lora_A.weight": None}, "has no .*q_proj.lora_A.weight"),
        ({f"base_model.model.{MODULES[3]}.lora_{x}.weight": None for x in "AB"}, "layers.1.self_attn.v_proj.lora_A"),
        ({"base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight": torch.zeros(4, 16),
          "base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight": torch.zeros(16, 4)}, "layers.2.*lacks"),
        ({f"base_model.model.{MODULES[0]}.lora_A.weight": torch.zeros(2, 16)}, r"shape \[2, 16\].*needs \[4, 16\]"),
        ({f"base_model.model.{MODULES[0]}.lora_A.weight": torch.zeros(4, 16, dtype=torch.int8)}, "as I8"),
    ],
)  # fmt: skip
def test_adapters_of_other_matrices_than_the_models_are_refused(changes: Any, says: str, tmp_path: Path) -> None:
    base = read_weight_files(write_base(tmp_path / "base"))
    with pytest.raises(AdapterError, match=says):
        check_adapter_tensors(write_tensors(tmp_path, **changes), SETTINGS, base)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(
        AdapterError, match=r"has no adapter_model.safetensors: it has adapter_model.bin, which is never"
    ):
        check_adapter_tensors(tmp_path, SETTINGS)
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"torn")
    with pytest.raises(FolderError, match="truncated or damaged"):
        check_adapter_tensors(tmp_path, SETTINGS)
    assert load_file(write_tensors(tmp_path) / ADAPTER_WEIGHTS)
    with pytest.raises(AdapterError, match="it was saved without adapters"):
        check_adapter_config(tmp_path, SETTINGS)
