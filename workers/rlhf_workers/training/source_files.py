"""What a model's folder has beside its weights: the ranks that hold its first stage write it into every checkpoint.

A model given by hub id is in the caches of the workers that loaded it and need not be anywhere else: the coordinator
makes a whole folder of the ranks' files and downloads none. Rule: read once, when the rank is built, and kept in
memory: the cache may be another one in the next pod, and the checkpoint that a rank came from is pruned meanwhile. Of
a model in a folder nothing is read here, as the coordinator sees the same folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms import ModelRole
from rlhf_api.job import RLHFJob
from rlhf_workers.models import model_folder
from rlhf_workers.training.rank_layout import RankLayout
from rlhf_workers.training.tensor_file import write_file

SUFFIXES: Final = frozenset({".json", ".model", ".txt", ".jinja"})
"""Configuration and tokenizer files: what is taken from a hub beside safetensors."""
INDEX: Final = ".safetensors.index.json"
"""Ends the name of a file that is about weights, which get another one."""

SourceFiles = Mapping[str, Mapping[str, bytes]]
"""Model role -> name -> content."""


def read_source_files(job: RLHFJob, layout: RankLayout, checkpoint_folder: str) -> SourceFiles:
    """Return files of the hub models whose first stage this rank writes; of the checkpoint if it starts from one."""
    files = {}
    for model, stage in layout.held:
        role = ModelRole(model)
        source = job.spec.models.source(role)
        assert source is not None  # a role that is trained is a model
        if stage or not layout.writes(model, stage) or Path(source.path).is_dir():
            continue
        cached = Path(checkpoint_folder) / model if checkpoint_folder else None
        files[model] = _read(cached or model_folder(source.path, job.spec.models.path_field(role)))
    return files


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
