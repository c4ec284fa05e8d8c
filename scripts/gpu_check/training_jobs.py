"""Training ranks over models made on the spot, as the product builds them: what the steps of training share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_check.random_models import LlamaShape
from rlhf_api import control_pb2 as pb
from rlhf_api.job import RLHFJob
from rlhf_api.schedule import Pipeline
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.training.backends.torch_backend import LoadStage, build_trainer, load_stage
from rlhf_workers.training.batches.training_batch import TrainingBatch
from rlhf_workers.training.schedule.step_timing import NoCommunicator
from rlhf_workers.training.trainer import Trainer


@dataclass(frozen=True)
class BatchShape:
    """Of one mini-batch; all samples are alike."""

    samples: int
    """Of a micro-batch."""
    microbatches: int
    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        """Tokens of the mini-batch."""
        return self.samples * self.microbatches * (self.prompt + self.response)


def training_job(folder: Path, batch: BatchShape, **training: Any) -> RLHFJob:
    """Return a PPO job with the model of `folder` as actor and as critic; made-up samples of it are of the shape
    `batch`: half as long as the longest that the job allows."""
    size = batch.samples * batch.microbatches
    model = {"path": str(folder)}
    spec = {
        "algorithm": {"ppo": {"miniBatchSize": size}},
        "models": {"actor": model, "critic": model, "reward": {"function": {"module": "none"}}},
        "prompts": {"path": "none"},
        "rollout": {
            "batchSize": size,
            "maxPromptTokens": 2 * batch.prompt,
            "maxResponseTokens": 2 * batch.response,
        },
        "training": {"microBatchSize": batch.samples, **training},
    }
    body = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "gpu-check"}, "spec": spec}
    return RLHFJob.model_validate(body)


def trainer_alone(
    job: RLHFJob, batch: BatchShape, device: torch.device, model: str, load: LoadStage = load_stage
) -> Trainer:
    """Return a rank that is its whole group and trains one model; `load` is how a backend loads its stages."""
    pipeline = Pipeline(name=model, model=model, stage_ranks=(0,), microbatches=batch.microbatches)
    become = pb.BecomeTraining(rank=0, world_size=1, schedule=serial_table([pipeline]).model_dump_json())
    return build_trainer(job, become, device, lambda _: NoCommunicator(), lambda *_, **__: None, load)


def metrics_of(trainer: Trainer, batch: TrainingBatch) -> dict[str, float]:
    """Take the step of one mini-batch, as the job's first, and return what the trainer says of it."""
    training = trainer.train(0, batch)
    while True:
        try:
            next(training)
        except StopIteration as ended:
            metrics: dict[str, float] = ended.value
            return metrics


def step_flops(shape: LlamaShape, batch: BatchShape, *, logits: bool) -> float:
    """Return the floating point operations of forward and backward of a mini-batch, as utilisation counts them:
    nothing that is computed again, of causal attention the half that is seen."""
    width = shape.hidden // shape.heads
    layer = shape.hidden * (2 * shape.hidden + 2 * shape.key_value_heads * width + 3 * shape.intermediate)
    length = batch.prompt + batch.response
    matrices = 6.0 * shape.layers * layer * batch.tokens
    attention = 6.0 * shape.layers * shape.hidden * length * batch.tokens
    head = 6.0 * shape.hidden * shape.vocabulary * batch.samples * batch.microbatches * batch.response
    return matrices + attention + (head if logits else 0.0)
