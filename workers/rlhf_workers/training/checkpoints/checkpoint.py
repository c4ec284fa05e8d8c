"""A rank's part of a checkpoint folder, and bitwise restoration of training state from one.

Files, relative to the folder: `<model>/model-stage-NNNNN.safetensors` (weights under Hugging Face names, in the stage's
`saved_type`; with adapters `adapter-stage-NNNNN.safetensors` and `adapter_config.json`, with PEFT's names),
`masters/<model>-stage-NNNNN.safetensors` (float32 weights, if the former are not),
`optimizer/<model>-stage-NNNNN.safetensors` (`<parameter>.exp_avg`, `.exp_avg_sq`), and from rank 0 `trainer.json`.
`draft_files` lists those of a draft model.

Rule: the folder is private until the coordinator renames it; a partial file never has its final name.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rlhf_api.algorithms import ModelRole
from rlhf_common import control_pb2 as pb
from rlhf_common.json_document import parse_json
from rlhf_common.names import ADAPTER_CONFIG, ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.training.checkpoints.draft_files import save_draft
from rlhf_workers.training.optimizers.nonfinite import NonFiniteSteps
from rlhf_workers.training.optimizers.optimizer import Horizon
from rlhf_workers.training.stages import adapters
from rlhf_workers.training.stages.pipeline_stage import HEADS_IN_FILES
from rlhf_workers.training.trainer import Trainer
from rlhf_workers.training.training_progress import TrainingProgress
from rlhf_workers.weights import peft_folder
from rlhf_workers.weights.expert_files import as_in_files
from rlhf_workers.weights.tensor_file import CHECKPOINT_FIELD, TensorFolder, write_file, write_tensors, write_weights

STATE_FILE: Final = "trainer.json"


def save(trainer: Trainer, folder: Path, version: int) -> list[pb.CheckpointFile]:
    """Write this rank's part and return its files. Replicas that hold the same as the first write nothing except their
    share of the moments. Raises WorkError StorageFull, StorageDenied, StorageFailed.
    """
    files = []
    for model, stage in trainer.layout.local_stages:
        optimizer, whole = trainer.optimizers[model, stage], trainer.writes(model, stage)
        if whole:
            files += _save_weights(trainer, folder, model, stage)
        if whole or optimizer.shares.part:
            moments = f"optimizer/{model}-stage-{stage:05d}{optimizer.part}{optimizer.shares.part}.safetensors"
            files.append(write_tensors(folder, moments, optimizer.state(), ""))
    if trainer.draft is not None:
        files += save_draft(trainer.draft, folder)
    if trainer.layout.rank == 0:
        state = {
            "version": version,
            "steps": trainer.progress.steps,
            "algorithm": trainer.algorithm.state(),
            "horizon": asdict(trainer.progress.horizon),
            "nonFiniteSteps": asdict(trainer.progress.non_finite),
            "heldSteps": trainer.progress.held_steps,
        }
        files.append(write_file(folder, STATE_FILE, iter([json.dumps(state).encode()])))
    return files


def _save_weights(trainer: Trainer, folder: Path, model: str, stage: int) -> list[pb.CheckpointFile]:
    """Write the trained weights of a stage; adapters under PEFT's names, with their settings."""
    optimizer, settings = trainer.optimizers[model, stage], trainer.spec.training.adapters(ModelRole(model))
    weights = {HEADS_IN_FILES.get(name, name): value for name, value in optimizer.weights()}
    if settings is None:
        trained = trainer.stages[model, stage]
        in_files = (part for named in weights.items() for part in as_in_files(*named, trained.config.model_type))
        return write_weights(folder, model, f"{stage:05d}{optimizer.part}", dict(in_files), trained.saved_type)
    named = {peft_folder.peft_name(name): value for name, value in weights.items()}
    files = [write_tensors(folder, f"{model}/adapter-stage-{stage:05d}.safetensors", named, model)]
    if stage == 0:
        source = trainer.spec.models.source(ModelRole(model))
        assert source is not None  # a trained role has a model
        whole = adapters.saved_whole(trainer.stages[model, stage].head)
        content = json.dumps(peft_folder.config(settings, source.path, whole), indent=2, sort_keys=True).encode()
        files.append(write_file(folder, f"{model}/{ADAPTER_CONFIG}", iter([content])))
    return files


def restore(trainer: Trainer, folder: Path, version: int) -> None:
    """Read optimizer, progress and algorithm state of a checkpoint into a trainer whose stages hold its weights."""
    try:
        state = parse_json((folder / STATE_FILE).read_text(encoding="utf-8"))
        saved_version, trainer.progress = state["version"], _progress(state)
        trainer.algorithm.restore(state["algorithm"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(folder, f"{STATE_FILE} cannot be read: {error!r}") from error
    if saved_version != version:
        raise _corrupt(folder, f"{STATE_FILE} holds version {saved_version}, not {version}")
    for (model, _), optimizer in trainer.optimizers.items():
        files = sorted((folder / "optimizer").glob(f"{model}-stage-*.safetensors"))
        optimizer.load_state(TensorFolder(files, CHECKPOINT_FIELD), trainer.progress.steps - trainer.held_steps(model))


def _progress(state: dict[str, Any]) -> TrainingProgress:
    horizon, non_finite = Horizon(**state["horizon"]), NonFiniteSteps(**state["nonFiniteSteps"])
    return TrainingProgress(int(state["steps"]), horizon, non_finite, int(state["heldSteps"]))


def _corrupt(folder: Path, why: str) -> WorkError:
    return WorkError(
        "CheckpointCorrupt",
        f"{CHECKPOINT_FIELD}: {folder}: {why}",
        field=CHECKPOINT_FIELD,
        exit_code=ExitCode.BAD_MODEL,
    )
