"""What a model's folder has beside its weights: the ranks that hold its first stage write it into every checkpoint.

A model given by hub id is in the caches of the workers that loaded it and need not be anywhere else: the coordinator
makes a whole folder of the ranks' files and downloads none. Rule: read once, when the rank is built, and kept in
memory: the cache may be another one in the next pod, and the checkpoint that a rank came from is pruned meanwhile. Of
a model in a folder nothing is read here, as the coordinator sees the same folder; but the configuration of a reward
model is written anew, as it may have started from a language model and is loaded as a classifier.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms import ModelKind, ModelRole, graph_of
from rlhf_api.job import RLHFJob
from rlhf_api.names import DRAFT_MODEL, DRAFT_MODEL_FIELD
from rlhf_workers.models import model_folder
from rlhf_workers.training.rank_layout import RankLayout
from rlhf_workers.training.tensor_file import write_file

CONFIG: Final = "config.json"
SUFFIXES: Final = frozenset({".json", ".model", ".txt", ".jinja"})
"""Configuration and tokenizer files: what is taken from a hub beside safetensors."""
INDEX: Final = ".safetensors.index.json"
"""Ends the name of a file that is about weights, which get another one."""

SourceFiles = Mapping[str, Mapping[str, bytes]]
"""Model role -> name -> content."""


def read_source_files(job: RLHFJob, layout: RankLayout, checkpoint_folder: str) -> SourceFiles:
    """Return files of the hub models whose first stage this rank writes; of the checkpoint if it starts from one."""
    files: dict[str, dict[str, bytes]] = {}
    for model, stage in layout.held:
        role = ModelRole(model)
        source = job.spec.models.source(role)
        assert source is not None  # a role that is trained is a model
        if stage or layout.tensor_rank(model) or not layout.writes(model, stage):
            continue
        cached = Path(checkpoint_folder) / model if checkpoint_folder else None
        folder = cached or model_folder(source.path, job.spec.models.path_field(role))
        files[model] = {} if Path(source.path).is_dir() else _read(folder)
        if role.kind is ModelKind.REWARD:
            files[model][CONFIG] = _of_classifier((folder / CONFIG).read_bytes())
    if of_draft := _of_draft_model(job, layout, checkpoint_folder):
        files[DRAFT_MODEL] = of_draft
    return files


def _of_classifier(config: bytes) -> bytes:
    """Return the configuration of a sequence classification model with one output, of that of its language model."""
    content = json.loads(config)
    family = str(next(iter(content.get("architectures") or ["ForCausalLM"]))).split("For")[0]
    content["architectures"] = [f"{family}ForSequenceClassification"]
    content["id2label"], content["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
    return json.dumps(content, indent=2, sort_keys=True).encode()


def _of_draft_model(job: RLHFJob, layout: RankLayout, checkpoint_folder: str) -> dict[str, bytes]:
    """As of other models, by the rank that writes a draft model that is trained."""
    draft, policy = job.spec.generation.speculation.draft_model, graph_of(job.spec).policy
    if draft is None or draft.train == "Disabled" or not layout.writes(policy, layout.stages(policy) - 1):
        return {}
    if Path(draft.path).is_dir():
        return {}
    saved = Path(checkpoint_folder) / DRAFT_MODEL if checkpoint_folder else None
    return _read(saved if saved is not None and saved.is_dir() else model_folder(draft.path, DRAFT_MODEL_FIELD))


def write_source_files(folder: Path, files: SourceFiles) -> list[pb.CheckpointFile]:
    """Write the files into a checkpoint's folder. WorkError StorageFull, StorageDenied."""
    return [
        write_file(folder, f"{model}/{name}", iter([content]))
        for model, listed in files.items()
        for name, content in listed.items()
    ]


def _read(folder: Path) -> dict[str, bytes]:
    listed = sorted(item for item in folder.iterdir() if item.suffix in SUFFIXES and not item.name.endswith(INDEX))
    return {item.name: item.read_bytes() for item in listed if item.is_file()}
