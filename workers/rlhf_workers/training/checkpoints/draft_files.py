"""The draft model on disk: read from its folder or a checkpoint, checked against the policy, written into checkpoints.

In a checkpoint it is `draft/model-stage-00000.safetensors`, of which the coordinator makes a Hugging Face folder as of
the others, `masters/draft-stage-00000.safetensors` where that is not float32, and
`optimizer/draft-stage-00000.safetensors`, its moments and its own number of steps.

Rule: what cannot draft for the policy is refused before training begins, in words. A checkpoint without a draft model
(one from before it was trained) begins it from the manifest's folder; one with it, bit by bit where it was.
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
"""Of the policy's parameters: a draft token that costs half a pass of the policy has to be right every other time for
nothing to be lost, and what a rank keeps of the draft model comes on top of its stage."""
PADDING: Final = 512
"""Rows by which logits over one and the same vocabulary may differ, as families pad them by size (Qwen2.5: 151,936 and
152,064). Whether the tokenizers are the same is asked by generation workers, who load both."""
DRAFT_STAGE: Final = "00000"
"""Number of its only stage, in names of files."""
MOMENTS: Final = f"optimizer/{DRAFT_MODEL}-stage-{DRAFT_STAGE}.safetensors"
STEPS: Final = "steps"
"""Name of the number of optimizer steps beside the moments; no parameter has it."""


def build_draft_training(
    job: RLHFJob,
    layout: RankLayout,
    communicator: Communicator,
    checkpoint: str,
    device: torch.device,
    span: SpanSink,
) -> DraftTraining | None:
    """Return this rank's part of the training of a draft model, restored; None in a job that trains none.

    WorkError as `load_draft_stage`.
    """
    draft, policy = job.spec.generation.speculation.draft_model, graph_of(job.spec).policy
    if draft is None or draft.train == "Disabled":
        return None
    stage = None
    if (policy, layout.stages(policy) - 1) in layout.held:
        source, field = job.spec.models.source(policy), job.spec.models.path_field(policy)
        assert source is not None  # a policy is a model
        folder = Path(checkpoint) / policy if checkpoint else checked_folder(source.path, field)
        stage = load_draft_stage(job, read_config(folder, field, 1), checkpoint, device)
    training = DraftTraining(job.spec, stage, layout, communicator, device, compute_dtype(job.spec), span)
    if checkpoint:
        restore_draft(training, Path(checkpoint))
    return training


def load_draft_stage(job: RLHFJob, policy: Any, checkpoint: str, device: torch.device) -> ModelStage:
    """Return the whole draft model, from the checkpoint if it holds one; `policy` is the policy's configuration.

    WorkError ModelUnsupported when it cannot draft for this policy.
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
    """Return why a model of configuration `draft` cannot be trained to draft for `policy`; empty when it can."""
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
    """Write the draft model, on the one rank that does. WorkError StorageFull, StorageDenied."""
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
    """Take moments and steps of a checkpoint whose weights the draft model holds; of one without it, nothing."""
    if draft.optimizer is None or not (checkpoint / DRAFT_MODEL).is_dir():
        return
    tensors = TensorFolder([checkpoint / MOMENTS], CHECKPOINT_FIELD)
    draft.steps = int(tensors.read(STEPS, torch.Size([])))
    if draft.steps:
        draft.optimizer.load_state(tensors, draft.steps)
