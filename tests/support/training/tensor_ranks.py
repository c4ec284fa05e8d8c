"""Helpers for tests of divided stages: models with divisible heads, a critic with a head, and merged moments."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.support.model_folders import models

from rlhf_workers.training.parallel.tensor_parts import read_parts
from rlhf_workers.training.stages.pipeline_stage import HEADS_IN_FILES, VALUE_HEAD
from rlhf_workers.weights.tensor_file import TensorFolder

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}


def write_critic(policy: Path) -> None:
    """Write a critic beside a policy; its value head is not zero, because that would give no gradient."""
    shutil.copytree(policy, critic_of(policy))
    tensors = load_file(policy / "model.safetensors")
    head = 0.1 * torch.randn(1, models.build_config("llama").hidden_size, generator=torch.Generator().manual_seed(3))
    without = {name: value for name, value in tensors.items() if not name.startswith("lm_head")}
    save_file(without | {VALUE_HEAD: head}, critic_of(policy) / "model.safetensors", {"format": "pt"})


def critic_of(policy: Path) -> Path:
    return policy.with_name(f"{policy.name}-critic")


def whole_moments(folder: Path) -> dict[str, torch.Tensor]:
    """Return the merged moments of a checkpoint; a critic's head has its own name among them."""
    result, own = {}, {name: head for head, name in HEADS_IN_FILES.items()}
    for model in ("actor", "critic"):
        files = sorted((folder / "optimizer").glob(f"{model}-stage-*.safetensors"))
        shapes = {
            own.get(name, name): value.shape
            for file in (folder / model).glob("*.safetensors")
            for name, value in load_file(file).items()
        }
        tensors = TensorFolder(files, "")
        for name, shape in shapes.items():
            for moment in ("exp_avg", "exp_avg_sq"):
                result[f"{model}:{name}.{moment}"] = read_parts(tensors, f"{name}.{moment}", shape)
    return result
