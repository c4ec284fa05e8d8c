"""Compares gradients by name up to rounding, also with those of the whole model without our code."""

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.support.algorithms import member
from tests.support.training.training_ranks import CPU, gradients_of, make_batch, make_job, prepared, serial

from rlhf_api.job import RLHFJob
from rlhf_workers.models.loading import load_backbone_with_value_head
from rlhf_workers.training.batches.training_batch import TrainingBatch


def assert_same_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    """Compare tensors relative to the largest number of each."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        scale = float(expected.abs().max()) or 1.0
        assert float((ours[name] - expected).abs().max()) <= tolerance * scale, name


def relative_error(rounded: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Return the distance of all gradients together from the exact ones, relative to the length of the exact ones."""
    squares = [((rounded[name] - value).square().sum(), value.square().sum()) for name, value in exact.items()]
    wrong, all_of_it = (float(sum(pair[side] for pair in squares)) for side in (0, 1))
    return math.sqrt(wrong / all_of_it)


def plain_gradients(job: RLHFJob, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    """Return gradients of transformers and written-out PPO, sample by sample."""
    spec = job.spec
    assert spec.models.critic is not None
    batch = prepared(job, batch)
    actor = transformers.AutoModelForCausalLM.from_pretrained(spec.models.actor.path, attn_implementation="eager")
    critic = load_backbone_with_value_head(
        spec.models.critic.path, field="", dtype=torch.float32, device=CPU, attention="eager"
    )
    actor.eval()
    actor_loss, critic_loss = torch.zeros(()), torch.zeros(())
    for row, prompt in enumerate(batch.prompts):
        length = int(batch.response_lengths[row])
        response = batch.responses[row, :length]
        tokens = torch.cat([prompt, response])[None]
        states = slice(len(prompt) - 1, len(prompt) + length - 1)
        field = {name: values[row, :length] for name, values in batch.fields.items()}
        logits = actor(tokens).logits[0, states] / spec.rollout.temperature
        log_p = torch.log_softmax(logits, -1)[torch.arange(length), response]
        ratio = torch.exp(log_p - field["log_probabilities"])
        advantage = field["advantages"]
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        value = critic.requires_grad_()(tokens)[0, states]
        clipped = field["values"] + (value - field["values"]).clamp(-0.2, 0.2)
        squared = torch.maximum((value - field["returns"]) ** 2, (clipped - field["returns"]) ** 2)
        if batch.valid[row]:
            actor_loss = actor_loss - surrogate.sum() / batch.tokens
            critic_loss = critic_loss + 0.5 * squared.sum() / batch.tokens
    (actor_loss + critic_loss).backward()
    named = {f"actor:{name}": value.grad for name, value in actor.named_parameters()}
    named |= {f"critic:{name}": value.grad for name, value in critic.named_parameters()}
    return named


OF_WHOLE_RESPONSES = ("dpo", "onlineDpo", "rewardModel", "sft", "gspo", "safeRlhf")
"""Algorithms that sum over a sample, read its last token, keep two samples together, or have a third model."""


def algorithm_gradients(
    algorithm: str, folder: Path, scratch: Path, pipeline: int, batch: TrainingBatch | None = None, **training: Any
) -> dict[str, torch.Tensor]:
    """Return the gradients of an algorithm of `OF_WHOLE_RESPONSES` for a folder's model, by default on `make_batch`;
    `scratch` caches derived models.
    """
    fields: dict[str, Any] = {"algorithm": member(algorithm), "rollout": {"batchSize": 8}}
    trained = {"rewardModel": ("reward",), "safeRlhf": ("actor", "critic", "cost_critic")}.get(algorithm, ("actor",))
    if algorithm == "rewardModel":
        if not (scratch / "config.json").exists():  # its head is random
            classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
            classifier.save_pretrained(scratch)
        fields["models"] = {"actor": {"path": str(folder)}, "reward": {"model": {"path": str(scratch)}}}
    job = make_job(folder, training={"microBatchSize": 4, **training}, **fields)
    world = pipeline * job.spec.training.parallelism.context
    return gradients_of(job, serial(job, pipeline, 1, trained), world, batch or make_batch(algorithm))
