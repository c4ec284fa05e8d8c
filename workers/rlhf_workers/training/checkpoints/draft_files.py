"""The draft model on disk: read from its folder or a checkpoint, checked against the policy, written into checkpoints.

In a checkpoint it has the files `draft/model-stage-00000.safetensors`, `masters/draft-stage-00000.safetensors` if the
former is not float32, and `optimizer/draft-stage-00000.safetensors` with its moments and its own step count.
"""

from pathlib import Path
from typing import Any, Final

import torch
import transformers

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.names import DRAFT_MODEL, DRAFT_MODEL_FIELD, ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.models.loading import checked_folder
from rlhf_workers.models.precision import compute_dtype
from rlhf_workers.training.backends.registry import SpanSink
from rlhf_workers.training.checkpoints.source_files import saved_type
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.draft_training import DraftTraining
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.stages.model_stages import ModelStage, attention_of, build_stage, read_config
from rlhf_workers.weights.expert_files import as_in_files
from rlhf_workers.weights.tensor_file import (
    CHECKPOINT_FIELD,
    TensorFolder,
    checkpoint_tensors,
    model_tensors,
    write_tensors,
    write_weights,
)

LARGEST_SHARE: Final = 0.5
"""Maximum parameters of the draft model as a share of the policy's."""
PADDING: Final = 512
"""Least difference of the draft model's vocab_size from the policy's for which it is refused."""
DRAFT_STAGE: Final = "00000"
"""Number of its only stage in file names."""
MOMENTS: Final = f"optimizer/{DRAFT_MODEL}-stage-{DRAFT_STAGE}.safetensors"
STEPS: Final = "steps"
"""Name of the optimizer step count beside the moments; no parameter has this name."""


def build_draft_training(
    job: RLHFJob,
    layout: RankLayout,
    communicator: Communicator,
    checkpoint: str,
    device: torch.device,
    span: SpanSink,
) -> DraftTraining | None:
    """Return this rank's part of the training of a draft model, restored; None if the job trains none.

    Raises WorkError like `load_draft_stage`.
    """
    draft, policy = job.spec.generation.speculation.draft_model, graph_of(job.spec).policy
    if draft is None or draft.train == "Disabled":
        return None
    stage = None
    if (policy, layout.stages(policy) - 1) in layout.local_stages:
        source, field = job.spec.models.source(policy), job.spec.models.path_field(policy)
        assert source is not None  # a policy has a model
        folder = Path(checkpoint) / policy if checkpoint else checked_folder(source.path, field)
        stage = load_draft_stage(job, read_config(folder, field, 1), checkpoint, device)
    training = DraftTraining(job.spec, stage, layout, communicator, device, compute_dtype(job.spec), span)
    if checkpoint:
        restore_draft(training, Path(checkpoint))
    return training


def load_draft_stage(job: RLHFJob, policy: Any, checkpoint: str, device: torch.device) -> ModelStage:
    """Return the whole draft model, from the checkpoint if it contains one; `policy` is the policy's configuration.

    Raises WorkError, such as ModelUnsupported if it cannot draft for this policy.
    """
    draft = job.spec.generation.speculation.draft_model
    assert draft is not None, "only a job with a draft model trains one"
    saved = bool(checkpoint) and (Path(checkpoint) / DRAFT_MODEL).is_dir()
    folder = Path(checkpoint) / DRAFT_MODEL if saved else checked_folder(draft.path, DRAFT_MODEL_FIELD)
    config = read_config(folder, DRAFT_MODEL_FIELD, 1)
    if problem := draft_problem(config, policy):
        message = f"{DRAFT_MODEL_FIELD}: {draft.path}: {problem}"
        raise WorkError("ModelUnsupported", message, field=DRAFT_MODEL_FIELD, exit_code=ExitCode.BAD_MODEL)
    if saved:
        tensors = checkpoint_tensors(Path(checkpoint), DRAFT_MODEL, DRAFT_MODEL_FIELD)
    else:
        tensors = model_tensors(folder, DRAFT_MODEL_FIELD)
    stage = build_stage(config, tensors, 1, 0, "lm", device, attention_of(job))
    stage.saved_type = saved_type(job.spec, draft.path, folder)
    return stage


def draft_problem(draft: Any, policy: Any) -> str:
    """Return why a model with configuration `draft` cannot be trained to draft for `policy`; empty if it can."""
    if abs(draft.vocab_size - policy.vocab_size) >= PADDING:
        return (
            f"its logits are over {draft.vocab_size} tokens and the policy's over {policy.vocab_size}: use a model "
            "with the policy's tokenizer"
        )
    ours, largest = _parameters(draft), int(LARGEST_SHARE * _parameters(policy))
    if ours > largest:
        return (
            f"it has {ours:,} parameters, and a draft model that is trained has half of the policy's at most, here "
            f"{largest:,}: use one with fewer layers or a smaller hidden_size"
        )
    return ""


def _parameters(config: Any) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def save_draft(draft: DraftTraining, folder: Path) -> list[pb.CheckpointFile]:
    """Write the draft model, on the rank responsible for it. Raises WorkError like `checkpoint.save`."""
    optimizer, stage = draft.optimizer, draft.stage
    if optimizer is None or stage is None or not draft.writes:
        return []
    family = stage.config.model_type
    weights = dict(part for name in optimizer.owned for part in as_in_files(name, optimizer.parameters[name], family))
    steps = {STEPS: torch.tensor(float(draft.steps), dtype=torch.float64)}
    return [
        *write_weights(folder, DRAFT_MODEL, DRAFT_STAGE, weights, stage.saved_type),
        write_tensors(folder, MOMENTS, {**optimizer.state(), **steps}, ""),
    ]


def restore_draft(draft: DraftTraining, checkpoint: Path) -> None:
    """Restore moments and steps from the checkpoint of the draft model's weights; do nothing without a draft model in
    it."""
    if draft.optimizer is None or not (checkpoint / DRAFT_MODEL).is_dir():
        return
    tensors = TensorFolder([checkpoint / MOMENTS], CHECKPOINT_FIELD)
    draft.steps = int(tensors.read(STEPS, torch.Size([])))
    if draft.steps:
        draft.optimizer.load_state(tensors, draft.steps)
