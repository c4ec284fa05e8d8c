"""Builds a trainer: the optimizers of a rank's stages, and the hooks for the features of the job.

Rule: the order of the hooks depends only on the manifest, because some of them sum over ranks.
"""

from collections.abc import Mapping

import torch

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_workers.training.backends.registry import SpanSink
from rlhf_workers.training.batches.micro_batch_splitter import MicroBatchSplitter, ModelOperations
from rlhf_workers.training.batches.padding import Padding
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.draft_training import DraftTraining
from rlhf_workers.training.expert_load import ExpertLoad
from rlhf_workers.training.old_log_probabilities import OldLogProbabilities
from rlhf_workers.training.optimizers.host_moments import HostMoments
from rlhf_workers.training.optimizers.sharded_optimizer import optimizer_of
from rlhf_workers.training.optimizers.shared_moments import moment_shares
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.schedule.device_timers import timers_for
from rlhf_workers.training.stages.pipeline_stage import PipelineStage
from rlhf_workers.training.stages.stage_copy import StageCopies
from rlhf_workers.training.trainer import Trainer
from rlhf_workers.training.training_hooks import TrainingHook


def new_trainer(
    spec: RLHFJobSpec,
    layout: RankLayout,
    stages: Mapping[tuple[str, int], PipelineStage],
    communicator: Communicator,
    device: torch.device,
    compute: torch.dtype,
    span: SpanSink,
    draft: DraftTraining | None = None,
) -> Trainer:
    """Return the trainer of `stages`, which are those of `layout.local_stages`; `draft`: None trains no draft model.

    Raises WorkError if the mini-batch does not divide, or for an unusable plug-in.
    """
    offload = spec.training.parallelism.offload_optimizer
    shares = {key: moment_shares(layout, *key, spec.training.parallelism) for key in stages}
    optimizers = {
        key: optimizer_of(stage, spec.training.optimizer, shares[key], offload) for key, stage in stages.items()
    }
    for stage in stages.values():
        stage.recompute = spec.training.activation_checkpointing
    splitter = splitter_of(spec, layout, stages, communicator, device)
    marks, old = timers_for(device), None
    if spec.algorithm.fields.recomputes_logprobs:
        policy = graph_of(spec).policy
        old = OldLogProbabilities(spec, policy, stages, communicator, device, compute, marks, span, splitter)
    hooks: list[TrainingHook] = [StageCopies(stages, optimizers, device)]
    if draft is not None:
        hooks.append(draft)
    if offload:
        taught = [] if draft is None or draft.optimizer is None else [draft.optimizer]
        hooks.append(HostMoments([*optimizers.values(), *taught], communicator, device))
    hooks += [Padding(spec.training.shared_prompts != "Disabled"), ExpertLoad(stages, layout, communicator, device)]
    return Trainer(
        spec, layout, stages, optimizers, communicator, device, compute, span,
        device_timers=marks, hooks=hooks, draft=draft, old_log_probabilities=old, splitter=splitter,
    )  # fmt: skip


def splitter_of(
    spec: RLHFJobSpec,
    layout: RankLayout,
    stages: Mapping[tuple[str, int], PipelineStage],
    communicator: Communicator,
    device: torch.device,
) -> MicroBatchSplitter:
    """Return the split of a job's mini-batches. With `sharedPrompts: Auto` all ranks must call it together."""
    if spec.training.shared_prompts != "Auto":
        return MicroBatchSplitter(spec, {})
    configs = {model: stage.config for (model, _), stage in stages.items()}
    operations = ModelOperations.on_all_ranks(configs, layout.models, communicator, layout.world, device)
    return MicroBatchSplitter(spec, operations)
