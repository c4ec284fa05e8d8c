"""Low-rank adapters of a pipeline stage: their insertion, initial values, and publication.

Rule: the initial A depends only on the job's seed, the model's role and the parameter's name and shape. With a shared
trunk, frozen weights of models from one folder are one tensor on a rank.
"""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlhf_api.job.lora import Lora
from rlhf_api.peft_folder_check import A_SUFFIX, B_SUFFIX, LORA_FIELD
from rlhf_common.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.models.experts import has_experts
from rlhf_workers.models.lora_linear import LoraLinear, adapt
from rlhf_workers.training.stages.model_stages import ModelStage
from rlhf_workers.training.stages.pipeline_stage import HEADS_IN_FILES, SCORE_HEAD, VALUE_HEAD, Head, PipelineStage
from rlhf_workers.weights import peft_folder
from rlhf_workers.weights.tensor_file import TensorFolder


def require_no_experts(config: Any, field: str) -> None:
    """Raise WorkError ModelUnsupported for a model with experts: their matrices are in one tensor per layer, and
    `LoraLinear` adapts only linear maps."""
    if has_experts(config):
        raise WorkError(
            "ModelUnsupported",
            f"{LORA_FIELD}: the model of {field} is of model_type {config.model_type!r}, a mixture of experts, "
            "which has no adapters here: leave the field out, and all weights are trained",
            field=LORA_FIELD,
            exit_code=ExitCode.BAD_MODEL,
        )


def freeze(stage: ModelStage, compute: torch.dtype) -> None:
    """Freeze a stage without memory: its matrices get their compute type.

    Norms, biases and a value or score head, which is trained, keep theirs.
    """
    for name, parameter in stage.named_parameters():
        trained = name in (VALUE_HEAD, SCORE_HEAD)
        if not trained and parameter.ndim >= 2:
            parameter.data = parameter.data.to(compute)
        parameter.requires_grad_(trained)


def put_in(stage: ModelStage, settings: Lora, seed: int, model: str) -> None:
    """Insert adapters into a loaded stage: A uniform within 1 / sqrt(its columns), as in PEFT, and B zero."""
    adapt(stage.model.layers, settings)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name.endswith(A_SUFFIX):
                parameter.copy_(_begin(parameter.shape, f"{seed}/{model}/{name}"))
            elif name.endswith(B_SUFFIX):
                parameter.zero_()
    stage.eval()


def _begin(shape: torch.Size, key: str) -> torch.Tensor:
    """Return uniform values of `shape` derived from `key`, computed on the CPU so that every device starts alike."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
    bound = 1 / math.sqrt(shape[1])
    return (torch.rand(shape, generator=generator) * 2 - 1) * bound


Trunk = dict[tuple[str, str], torch.nn.Parameter]
"""(Folder, name) -> the frozen tensor that all stages of this rank with a model from this folder share."""


def share(stage: PipelineStage, folder: str, trunk: Trunk) -> None:
    """Replace a stage's frozen tensors by those of its folder in `trunk`, and add the missing ones to it."""
    for name, parameter in list(stage.named_parameters()):
        if parameter.requires_grad:
            continue
        shared = trunk.setdefault((folder, name), parameter)
        if shared is not parameter:
            module, _, last = name.rpartition(".")
            setattr(stage.get_submodule(module), last, shared)


def load(stage: PipelineStage, folder: Path, settings: Lora, field: str) -> None:
    """Load the adapters, and a trained head, from the PEFT folder that `field` names. Raises WorkError if they do not
    match the manifest."""
    peft_folder.check(folder, settings, field)
    tensors = TensorFolder([folder / ADAPTER_WEIGHTS], field)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                old, new = peft_folder.peft_name(name), peft_folder.peft_name(HEADS_IN_FILES.get(name, name))
                parameter.copy_(tensors.read(old if old in tensors else new, parameter.shape))


def merged_parameters(stage: PipelineStage, compute: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor in `compute`) of a stage as one model without adapters; each is computed on
    demand."""
    adapted = {f"{name}.weight": part for name, part in stage.named_modules() if isinstance(part, LoraLinear)}
    for name, parameter in stage.named_parameters():
        if name.endswith((A_SUFFIX, B_SUFFIX)) or name in stage.duplicates:
            continue
        yield name, (adapted[name].merged() if name in adapted else parameter.detach()).to(compute)


def published_alone(stage: PipelineStage, compute: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the trained parameters: A and B in float32, and a head in `compute`."""
    for name, parameter in stage.named_parameters():
        if parameter.requires_grad:
            yield name, parameter.detach() if name.endswith((A_SUFFIX, B_SUFFIX)) else parameter.detach().to(compute)


def saved_whole(head: Head) -> tuple[str, ...]:
    """Return the modules that are trained and saved in full beside the adapters."""
    return () if head == "lm" else (SCORE_HEAD.removesuffix(".weight"),)


def require_none(folder: Path) -> None:
    """Raise WorkError AdapterMismatch if a model's folder in a checkpoint holds adapters; for jobs that train all
    weights."""
    if (folder / ADAPTER_CONFIG).is_file():
        why = f"is not set, and {folder} holds adapters: set it as it was when they were saved"
        raise peft_folder.mismatch(LORA_FIELD, why)
