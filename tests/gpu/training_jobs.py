"""Training ranks with generated models, built as in the product.

Owns the shared code of the training steps. It must never time anything before a first mini-batch has warmed up.
"""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from tests.gpu.models import write_model
from tests.gpu.timing import begin_peak, best_seconds, peak_bytes
from tests.support.training.training_ranks import STAGES, exhaust, make_job
from transformers import LlamaConfig

from gpu_check.plugin import CheckedMachine
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.schedule import Pipeline
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.devices.device import open_device
from rlhf_workers.training.backends.torch_backend import build_trainer
from rlhf_workers.training.batches.training_batch import TrainingBatch
from rlhf_workers.training.schedule.step_timing import NoCommunicator, made_up_batch
from rlhf_workers.training.trainer import Trainer

PRECISIONS: Final = {torch.bfloat16: "BFloat16", torch.float32: "Float32"}


@dataclass(frozen=True)
class BatchShape:
    """One mini-batch of samples with equal shape."""

    samples: int
    """Number in a micro-batch."""
    microbatches: int
    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        """Return the tokens of the mini-batch."""
        return self.samples * self.microbatches * (self.prompt + self.response)


SMALL_BATCH: Final = BatchShape(samples=2, microbatches=2, prompt=8, response=8)


def begin(machine: CheckedMachine, config: LlamaConfig) -> torch.device:
    """Write the model to train; return the device, opened as in a rank."""
    logging.disable(logging.WARNING)  # made-up log-probabilities never match
    write_model(machine.scratch / "model", config, torch.bfloat16, machine.device)
    return open_device(str(machine.device))


def training_job(folder: Path, batch: BatchShape, *, deterministic: bool = False, **training: Any) -> RLHFJob:
    """Return a PPO job with the model of `folder`/model as actor and as critic.

    Generated samples of it have the shape `batch`: half as long as the longest that the job allows.
    """
    size, model = batch.samples * batch.microbatches, folder / "model"
    return make_job(
        model,
        model,
        training={"microBatchSize": batch.samples, "optimizer": {}, **training},
        algorithm={"ppo": {"miniBatchSize": size}},
        rollout={"batchSize": size, "maxPromptTokens": 2 * batch.prompt, "maxResponseTokens": 2 * batch.response},
        deterministic=deterministic,
    )


def trainer_alone(job: RLHFJob, batch: BatchShape, device: torch.device, model: str) -> Trainer:
    """Return a rank that is its whole group and trains one model."""
    pipeline = Pipeline(name=model, model=model, stage_ranks=(0,), microbatches=batch.microbatches)
    become = pb.BecomeTraining(rank=0, world_size=1, schedule=serial_table([pipeline]).model_dump_json())
    load = STAGES[job.spec.training.backend]
    return build_trainer(job, become, device, lambda _: NoCommunicator(), lambda *_, **__: None, load)


def take_step(trainer: Trainer, batch: TrainingBatch | None = None) -> dict[str, float]:
    """Take the step of one mini-batch, as the job's first; return the trainer's metrics."""
    metrics: dict[str, float] = exhaust(trainer.train(0, made_up_batch(trainer) if batch is None else batch))
    return metrics


def timed_steps(trainer: Trainer, batch: TrainingBatch, repeats: int, device: torch.device) -> dict[str, float]:
    """Return seconds of a step and the peak of memory, after a first step that allocates the moments."""
    begin_peak(device)
    seconds = best_seconds(partial(take_step, trainer, batch), repeats, device)
    return {"seconds": seconds, "tokens_per_second": sum(batch.lengths) / seconds, "peak_gb": peak_bytes(device) / 1e9}


def step_flops(config: LlamaConfig, batch: BatchShape, *, logits: bool) -> float:
    """Return the floating point operations of forward and backward of a mini-batch, as counted for utilisation.

    Recomputation is not counted; for causal attention only the visible half is.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    width = hidden // config.num_attention_heads
    layer = hidden * (2 * hidden + 2 * config.num_key_value_heads * width + 3 * config.intermediate_size)
    matrices = 6.0 * layers * layer * batch.tokens
    attention = 6.0 * layers * hidden * (batch.prompt + batch.response) * batch.tokens
    head = 6.0 * hidden * config.vocab_size * batch.samples * batch.microbatches * batch.response
    return float(matrices + attention + (head if logits else 0.0))
