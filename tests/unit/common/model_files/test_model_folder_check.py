"""Folders that two readers would interpret differently are rejected by name, from headers where that is enough."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.model_folders.models import ARCHITECTURES, write_policy

from rlhf_common.model_files.model_folder_check import (
    EMBEDDING,
    HEAD,
    TIED_BY_DEFAULT,
    check_model_folder,
    ties_embeddings,
)
from rlhf_common.model_files.weight_files import INDEX, SINGLE, FolderError

Change = Callable[[Path], object]


def set_config(**keys: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        config = {**json.loads(file.read_text()), **keys}
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))

    return change


def set_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})

    return changed


def shard(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    places = {name: names[number % 2] for number, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({name: tensors[name] for name in places if places[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / SINGLE).unlink()


def stale(name: str) -> Change:
    def change(folder: Path) -> None:
        shard(folder)
        save_file({"x": torch.ones(1)}, folder / name)

    return change


def beside(name: str) -> Change:
    return lambda folder: save_file({"x": torch.ones(1)}, folder / name)


def without_index(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).unlink()


def without_metadata(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": json.loads((folder / INDEX).read_text())["weight_map"]}))


def twice(folder: Path) -> None:
    shard(folder)
    for file in folder.glob("model-*"):
        save_file({**load_file(file), EMBEDDING: torch.ones(1)}, file)


def nested(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def nested_index(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).write_text("[" * 100_000)


def nested_header(folder: Path) -> None:
    (folder / SINGLE).write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)


def pickled(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def quantised(method: str, tensors: dict[str, torch.Tensor]) -> Change:
    def change(folder: Path) -> None:
        set_config(quantization_config={"quant_method": method})(folder)
        set_tensors(lambda stored: stored.update(tensors))(folder)

    return change


def adds(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda stored: stored.update({name: torch.ones(2)})


Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.up_proj"
FP8 = {f"{UP}.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), f"{UP}.weight_scale_inv": torch.ones(1, 1)}
CODES = torch.ones(4, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (stale(SINGLE), "ModelCorrupt", [SINGLE, INDEX, "different weights"]),
        (stale("model-00003-of-00003.safetensors"), "ModelCorrupt", ["model-00003-of-00003.safetensors", INDEX]),
        (beside("consolidated.safetensors"), "ModelCorrupt", ["consolidated.safetensors", SINGLE, f"no {INDEX}"]),
        (without_index, "ModelMissing", [f"no {INDEX}", "model-00001-of-00002.safetensors"]),
        (twice, "ModelCorrupt", [f"{EMBEDDING} is in model-00001-of-00002.safetensors and in model-00002-of"]),
        (
            without_metadata,
            "ModelCorrupt",
            [f'{INDEX} has no metadata, which transformers needs: add "metadata": {{}}'],
        ),
        (set_tensors(adds(f"{Q}.bias")), "ModelCorrupt", [f"{Q}.bias, and config.json has attention_bias false"]),
        (
            set_tensors(adds(f"{UP}.bias")),
            "ModelCorrupt",
            ["mlp_bias false", "correct config.json, or remove the tensor"],
        ),
        (
            set_tensors(adds(f"{Q}.lora_A.default.weight")),
            "ModelCorrupt",
            ["a layer of llama has no self_attn.q_proj.l"],
        ),
        (set_tensors(adds("model.layers.2.self_attn.q_norm.weight")), "ModelCorrupt", ["num_hidden_layers 2"]),
        (set_config(num_hidden_layers=1), "ModelCorrupt", ["model.layers.1.", "num_hidden_layers 1"]),
        (set_config(num_attention_heads=0), "ModelCorrupt", ["config.json: num_attention_heads is 0, must be a whole"]),
        (
            set_config(head_dim=0.5),
            "ModelCorrupt",
            ["config.json: head_dim is 0.5, must be a whole number of at least 1"],
        ),
        (
            set_config(num_experts=4, decoder_sparse_step=0.5),
            "ModelCorrupt",
            ["config.json: decoder_sparse_step is 0.5"],
        ),
        (set_config(sliding_window=8.5), "ModelCorrupt", ["config.json: sliding_window is 8.5, must be a whole"]),
        (nested, "ModelCorrupt", ["config.json is not JSON: it is nested too deep"]),
        (nested_index, "ModelCorrupt", [f"{INDEX} cannot be read", "nested too deep"]),
        (nested_header, "ModelCorrupt", [f"{SINGLE} is truncated or damaged: it is nested too deep"]),
        (pickled, "ModelMissing", ["pytorch_model.bin may run code"]),
        (quantised("fp8", FP8), "ModelUnsupported", ["quant_method fp8", UP, "weights are quantised", "bfloat16"]),
        (set_tensors(lambda stored: stored.update(FP8)), "ModelUnsupported", [f"{UP}.weight (F8_E4M3)"]),
        (quantised("gptq", {f"{UP}.qweight": CODES}), "ModelUnsupported", ["quant_method gptq", f"{UP}.qweight"]),
        (quantised("mxfp4", {f"{UP}_blocks": CODES}), "ModelUnsupported", ["quant_method mxfp4", f"{UP}_blocks"]),
        (quantised("compressed-tensors", {f"{UP}.weight_packed": CODES}), "ModelUnsupported", ["weight_packed"]),
        (quantised("bitsandbytes", {f"{UP}.weight": CODES.to(torch.uint8)}), "ModelUnsupported", [f"{UP}.weight (U8)"]),
        (
            set_tensors(lambda stored: stored.update({f"{UP}.weight_scale": torch.ones(1)})),
            "ModelUnsupported",
            ["_scale"],
        ),
        (set_config(quantization_config={"quant_method": "fp8"}), "ModelCorrupt", ["not quantised: remove it"]),
        (
            set_config(text_config={"quantization_config": {"quant_method": "awq"}}),
            "ModelCorrupt",
            ["quant_method awq"],
        ),
        (lambda folder: (folder / "hf_quant_config.json").write_text("{}"), "ModelCorrupt", ["hf_quant_config.json"]),
        (set_config(transformers_weights="other.safetensors"), "ModelUnsupported", ["transformers_weights"]),
        (set_config(tie_word_embeddings=True), "ModelCorrupt", [HEAD, EMBEDDING, "tie_word_embeddings true"]),
        (
            set_tensors(lambda stored: stored.pop(HEAD)),
            "ModelCorrupt",
            [f"{HEAD} is missing", "no tie_word_embeddings, which is false for llama"],
        ),
        (set_tensors(lambda stored: stored.pop(EMBEDDING)), "ModelCorrupt", [f"{EMBEDDING} is missing"]),
    ],
)
def test_a_folder_that_readers_would_take_differently_is_refused(
    change: Change, reason: str, words: list[str], tmp_path: Path
) -> None:
    folder = write_policy(tmp_path / "policy")
    set_config(tie_word_embeddings=...)(folder)
    check_model_folder(folder, head=True)
    change(folder)
    with pytest.raises(FolderError) as raised:
        check_model_folder(folder, head=True)
    assert raised.value.reason == reason
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        shard,
        stale("consolidated.safetensors"),
        lambda folder: (folder / "pytorch_model.bin").write_bytes(b"\x80"),
        set_tensors(lambda stored: stored.update({"model.position_ids": torch.arange(4)[None]})),
        set_tensors(
            lambda stored: stored.update({"model.layers.0.attn.bias": torch.ones(1, 1, 2, 2, dtype=torch.uint8)})
        ),
        set_config(quantization_config=None),
    ],
)
def test_a_folder_that_readers_take_alike_passes(change: Change, tmp_path: Path) -> None:
    folder = write_policy(tmp_path / "policy")
    change(folder)
    check_model_folder(folder, head=True)


def test_a_head_beside_a_tied_embedding_passes_when_it_is_equal(tmp_path: Path) -> None:
    folder = write_policy(tmp_path / "policy", tie_word_embeddings=True)
    set_tensors(lambda stored: stored.update({HEAD: stored[EMBEDDING].clone()}))(folder)
    check_model_folder(folder, head=True)
    set_tensors(lambda stored: stored[HEAD][-1, -1].add_(1e-3))(folder)
    with pytest.raises(FolderError, match="tie_word_embeddings to false"):
        check_model_folder(folder, head=True)
    check_model_folder(folder, head=False)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_default_of_a_family_is_that_of_transformers(family: str) -> None:
    default = transformers.AutoConfig.for_model(family).tie_word_embeddings
    assert TIED_BY_DEFAULT[family] == default == ties_embeddings({"model_type": family})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("bias", [True, False])
def test_every_tensor_that_a_family_saves_is_known(tmp_path: Path, architecture: str, bias: bool) -> None:
    write_policy(tmp_path, architecture, attention_bias=bias, mlp_bias=bias)
    set_tensors(adds("model.layers.0.self_attn.rotary_emb.inv_freq"))(tmp_path)
    check_model_folder(tmp_path, head=True)
