"""The files beside a model's weights: the rank that writes its first stage writes them into every checkpoint.

Rule: files are read once, when the rank is built, and stay in memory. The written configuration matches the files
beside it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from rlhf_api.algorithms import ModelKind, ModelRole, graph_of
from rlhf_api.job import RLHFJob, RLHFJobSpec
from rlhf_common import control_pb2 as pb
from rlhf_common.model_files.companion_files import companion_files
from rlhf_common.model_files.model_folder_check import CONFIG, QUANTISATION_KEYS, read_model_config
from rlhf_common.model_files.weight_files import CONFIG_TYPES, FolderError, read_weight_files
from rlhf_common.names import DRAFT_MODEL, DRAFT_MODEL_FIELD
from rlhf_workers.models.loading import folder_failure, model_folder
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.weights.tensor_file import write_file

TYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
"""Types of saved weights, by their names in config.json."""

SourceFiles = Mapping[str, Mapping[str, bytes]]
"""Model role -> name -> content."""


def read_source_files(job: RLHFJob, layout: RankLayout, checkpoint_folder: str) -> SourceFiles:
    """Return the files of the models whose first stage this rank writes, and of a trained draft model that it writes.

    They come from the checkpoint if the rank starts from one.
    """
    files: dict[str, dict[str, bytes]] = {}
    for model, stage in layout.local_stages:
        role = ModelRole(model)
        source = job.spec.models.source(role)
        assert source is not None  # a trained role has a model
        if stage or layout.tensor_rank(model) or not layout.writes(model, stage):
            continue
        field = job.spec.models.path_field(role)
        cached = Path(checkpoint_folder) / model if checkpoint_folder else None
        folder = cached or model_folder(source.path, field)
        files[model] = {} if Path(source.path).is_dir() else _read(folder, field)
        trained_whole = job.spec.training.adapters(role) is None
        if trained_whole or role.kind is not ModelKind.POLICY:
            files[model][CONFIG] = _config(job.spec, source.path, folder, role.kind, trained_whole=trained_whole)
    if of_draft := _of_draft_model(job, layout, checkpoint_folder):
        files[DRAFT_MODEL] = of_draft
    return files


def saved_type(spec: RLHFJobSpec, path: str, folder: Path) -> torch.dtype:
    """Return the number type in checkpoints of a model that starts from `folder`; `path` is the manifest's."""
    return TYPES[_type_name(spec, path, folder)]


def _type_name(spec: RLHFJobSpec, path: str, folder: Path) -> str:
    """Return float32 if spec.checkpoints.dtype says so, else the type in config.json, or else that of the first tensor;
    float32 for types not in TYPES.
    """
    if spec.checkpoints is not None and spec.checkpoints.dtype == "Float32":
        return "float32"
    folder = Path(path) if Path(path).is_dir() else folder
    config = read_model_config(folder)
    said = config.get("dtype") or config.get("torch_dtype")
    if said is None:
        tensors = read_weight_files(folder).tensors
        said = CONFIG_TYPES.get(next(iter(tensors.values())).dtype) if tensors else None
    name = str(said).removeprefix("torch.")
    return name if name in TYPES else "float32"


def _config(spec: RLHFJobSpec, path: str, folder: Path, kind: ModelKind, *, trained_whole: bool = True) -> bytes:
    """Return the saved configuration of a model that starts from `folder`. A value or reward model becomes a sequence
    classification model with one output."""
    config = read_model_config(folder)
    if trained_whole:
        config["dtype"] = _type_name(spec, path, folder)
        for key in ("torch_dtype", *QUANTISATION_KEYS):
            config.pop(key, None)
    if kind is not ModelKind.POLICY:
        config["architectures"] = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[config["model_type"]]]
        config["id2label"], config["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
    return json.dumps(config, indent=2, sort_keys=True).encode()


def _of_draft_model(job: RLHFJob, layout: RankLayout, checkpoint_folder: str) -> dict[str, bytes]:
    """Return the files of a trained draft model, on the rank that writes it."""
    draft, policy = job.spec.generation.speculation.draft_model, graph_of(job.spec).policy
    if draft is None or draft.train == "Disabled" or not layout.writes(policy, layout.stages(policy) - 1):
        return {}
    saved = Path(checkpoint_folder) / DRAFT_MODEL if checkpoint_folder else None
    folder = saved if saved is not None and saved.is_dir() else model_folder(draft.path, DRAFT_MODEL_FIELD)
    files = {} if Path(draft.path).is_dir() else _read(folder, DRAFT_MODEL_FIELD)
    return {**files, CONFIG: _config(job.spec, draft.path, folder, ModelKind.POLICY)}


def write_source_files(folder: Path, files: SourceFiles) -> list[pb.CheckpointFile]:
    """Write the files into a checkpoint's folder and return them. Raises WorkError StorageFull, StorageDenied."""
    return [
        write_file(folder, f"{model}/{name}", iter([content]))
        for model, listed in files.items()
        for name, content in listed.items()
    ]


def _read(folder: Path, field: str) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in companion_files(folder)}
    except FolderError as error:
        raise folder_failure(field, folder, error) from error
