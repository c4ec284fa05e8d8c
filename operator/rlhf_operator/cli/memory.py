"""Estimates of the memory each process of a job needs on its device, from config.json and safetensors headers alone.

Counted: weights; on generation workers the key-value cache at the full batch and the longest samples; on training ranks
float32 master weights, gradients and the two AdamW moments. Not counted: activations, logits, the runtime itself.
Rule: arithmetic over headers, nothing is loaded; a model that is not on this disk (a hub id) is unknown, not zero.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJob
from rlhf_api.job.groups import GroupFields
from rlhf_api.names import Group

FLOAT32_BYTES: Final = 4
HALF_BYTES: Final = 2
OPTIMIZER_BYTES: Final = 8
"""Two float32 moments of AdamW, a parameter."""
_MAX_HEADER: Final = 100 * 1024 * 1024
"""Bytes of a safetensors header, as the format's own library limits it."""


@dataclass(frozen=True)
class ModelSize:
    """What a model folder says about its size."""

    parameters: int
    cache_values_per_token: int
    """Keys and values of all layers, for one token."""


@dataclass(frozen=True)
class Estimate:
    """Memory of one process, in bytes by what it is for."""

    parts: Mapping[str, int]
    unknown: tuple[str, ...] = ()
    """Model roles whose size is not known here."""

    @property
    def total(self) -> int:
        """Bytes of all known parts."""
        return sum(self.parts.values())


def read_size(folder: Path) -> ModelSize | None:
    """Size of a Hugging Face folder; None when it is not on this disk or not readable as one."""
    try:
        config = json.loads((folder / "config.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            return None
        parameters = sum(_parameters(file) for file in files)
        return ModelSize(parameters, _cache_values(config.get("text_config") or config))
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def estimates(job: RLHFJob) -> dict[Group, Estimate]:
    """Estimate for one process of each group of a resolved job; for training, of the largest pipeline stage."""
    models = job.spec.models
    paths = {role: getattr(models, role).path for role in ("actor", "critic", "reference") if getattr(models, role)}
    if models.reward.model is not None:
        paths["reward"] = models.reward.model.path
    sizes = {role: read_size(Path(path)) for role, path in paths.items()}
    graph = graph_of(job.spec)
    scored = [task.model for task in graph.tasks_of(Group.INFERENCE) if task.model in paths]
    return {
        Group.GENERATION: _generation(job, sizes["actor"]),
        Group.INFERENCE: _inference(job, {role: sizes[role] for role in scored}),
        Group.TRAINING: _training(job, {role: sizes.get(role) for role in graph.trained}),
    }


def _generation(job: RLHFJob, actor: ModelSize | None) -> Estimate:
    spec = job.spec
    if actor is None:
        return Estimate({}, ("actor",))
    width = _compute_bytes(spec.generation)
    tokens = spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens
    cache = spec.generation.max_batch_size * tokens * actor.cache_values_per_token * width
    return Estimate({"weights": actor.parameters * width, "key-value cache": cache})


def _inference(job: RLHFJob, sizes: Mapping[str, ModelSize | None]) -> Estimate:
    width = _compute_bytes(job.spec.inference)
    known = {f"{role} weights": size.parameters * width for role, size in sizes.items() if size is not None}
    return Estimate(known, tuple(role for role, size in sizes.items() if size is None))


def _training(job: RLHFJob, sizes: Mapping[str, ModelSize | None]) -> Estimate:
    training = job.spec.training
    half = training.gpus_per_replica > 0 and training.precision != "Float32"
    parts = {"weights": 0, "gradients": 0, "optimizer": 0}
    for size in sizes.values():
        if size is not None:
            stage = -(-size.parameters // training.parallelism.pipeline)
            parts["weights"] += stage * (FLOAT32_BYTES + (HALF_BYTES if half else 0))
            parts["gradients"] += stage * FLOAT32_BYTES
            parts["optimizer"] += stage * OPTIMIZER_BYTES
    unknown = tuple(role for role, size in sizes.items() if size is None)
    return Estimate({} if len(unknown) == len(sizes) else parts, unknown)


def _compute_bytes(fields: GroupFields) -> int:
    """Bytes a value on the group's device: half precision on CUDA, float32 on CPU."""
    return HALF_BYTES if fields.gpus_per_replica else FLOAT32_BYTES


def _parameters(file: Path) -> int:
    """Values in a safetensors file: eight bytes of length, a JSON header, the data."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _MAX_HEADER:
            raise ValueError(f"{file}: header of {length} bytes")
        header = json.loads(stream.read(length))
    return sum(_product(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _product(shape: Sequence[int]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def _cache_values(config: Mapping[str, Any]) -> int:
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    return 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * width
