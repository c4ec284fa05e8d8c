"""The backend `megatron`: stages whose layers are chunks of Megatron-core's GPTModel, run by this project's schedule
tables.

Megatron's own pipeline schedules, data parallelism and optimizer are not used.
"""

from importlib.util import find_spec

import torch

from rlhf_api.algorithms import ModelRole
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.training.backends.registry import FIELD, SpanSink
from rlhf_workers.training.backends.torch_backend import (
    HEADS,
    TorchBackend,
    backend_of,
    type_in_checkpoints,
    weights_folder,
    weights_tensors,
)
from rlhf_workers.training.parallel.expert_group import ExpertGroup
from rlhf_workers.training.parallel.expert_stage import require_experts
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.parallel.tensor_group import TensorGroup
from rlhf_workers.training.stages import adapters
from rlhf_workers.training.stages.model_stages import attention_of, read_config
from rlhf_workers.training.stages.pipeline_stage import PipelineStage


def build_backend(job: RLHFJob, become: pb.BecomeTraining, device: torch.device, span: SpanSink) -> TorchBackend:
    """Return this rank of the group, ready to train. Raises WorkError BackendUnavailable if the image lacks
    Megatron-core."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise WorkError(
            "BackendUnavailable",
            f"{FIELD}: megatron needs Megatron-core, which this worker's image does not have: install "
            "rlhf-operator[megatron] into it, or use torch",
            field=FIELD,
            exit_code=ExitCode.USAGE,
        )
    return backend_of(job, become, device, span, load_stage)


def load_stage(
    job: RLHFJob,
    layout: RankLayout,
    model: str,
    stage: int,
    checkpoint_folder: str,
    device: torch.device,
    trunk: adapters.Trunk,
) -> PipelineStage:
    """Return one stage from the checkpoint, or from the manifest's folder without a checkpoint.

    Raises WorkError, such as BackendUnavailable if its model trains adapters.
    """
    from rlhf_workers.training.megatron.megatron_stage import build_megatron_stage  # not in every image

    role = ModelRole(model)
    if job.spec.training.adapters(role) is not None:
        raise WorkError(
            "BackendUnavailable",
            "spec.training.lora: adapters are trained by spec.training.backend torch alone",
            field="spec.training.lora",
            exit_code=ExitCode.USAGE,
        )
    if checkpoint_folder:
        adapters.require_none(weights_folder(job, role, checkpoint_folder)[0])
    folder, field = weights_folder(job, role, checkpoint_folder)
    stages = layout.stages(model)
    config = read_config(folder, field, stages)
    parts = config, weights_tensors(folder, role, field, checkpoint_folder), stages, stage, HEADS[role.kind]
    experts = None
    if layout.expert > 1:
        require_experts(config, layout.expert, field)
        experts = ExpertGroup(layout.expert_rank, layout.expert_group)
    parallelism, ranks = job.spec.training.parallelism, layout.tensor_group(model)
    by_position = parallelism.sequence_parallel == "Enabled" and len(ranks) > 1
    tensor = TensorGroup(layout.tensor_rank(model), ranks, by_position=by_position)
    keeps = len(ranks) > 1 and layout.writes(model, stage)
    split_by = f"spec.training.parallelism.{parallelism.tensor_field(role)}"
    built = build_megatron_stage(*parts, device, attention_of(job), tensor, keeps, split_by, experts)
    built.saved_type = type_in_checkpoints(job, role, folder)
    return built
