"""Checkpoint folders of a few bytes, as training ranks write them."""

import hashlib
from pathlib import Path

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.storage import checkpoint


def part(folder: Path, name: str, data: bytes, model: str = "", parameters: tuple[str, ...] = ()) -> pb.CheckpointFile:
    """Write one file of a checkpoint; return its rank's report of it."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    return pb.CheckpointFile(path=name, bytes=len(data), sha256=digest, model=model, parameters=parameters)


def source(tmp_path: Path) -> dict[str, checkpoint.SourceFolder]:
    """Create a folder of an actor's model; return it by model."""
    folder = tmp_path / "policy"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"):
        (folder / name).write_text(name)
    return {"actor": checkpoint.SourceFolder(str(folder), "spec.models.actor.path")}


def make_checkpoint(tmp_path: Path, version: int, stages: int = 2) -> checkpoint.Checkpoint:
    """Create the whole checkpoint of `version` with `stages` pipeline stages, in `checkpoints` below `tmp_path`."""
    path = tmp_path / "checkpoints"
    temporary = checkpoint.prepare(path, version)
    results = [
        pb.CheckpointResult(
            files=[
                part(temporary, f"actor/model-stage-0000{s}.safetensors", bytes([s] * 9), "actor", (f"p{s}", f"q{s}")),
                part(temporary, f"optimizer/stage-{s}.safetensors", b"moments"),
            ]
        )
        for s in range(stages)
    ]
    return checkpoint.finish(temporary, path, version, results, source(tmp_path), {"seed": 5})
