"""Supervised fine-tuning: loss and gradient equal transformers' own with labels that leave out the prompt."""

from pathlib import Path

import pytest
import torch
import transformers
from tests.support.algorithms import member
from tests.support.model_folders import models
from tests.support.training.training_ranks import gradients_of, make_batch, make_job, serial

IGNORED = -100


def test_the_gradient_is_that_of_cross_entropy_over_the_response_tokens(tmp_path: Path) -> None:
    folder = models.write_policy(tmp_path / "policy", "llama", seed=1)
    job = make_job(folder, algorithm=member("sft"), rollout={"batchSize": 8})
    batch = make_batch()
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    losses = torch.zeros(())
    for row, prompt in enumerate(batch.prompts):
        tokens = torch.cat([prompt, batch.responses[row, : int(batch.response_lengths[row])]])[None]
        labels = tokens.clone()
        labels[0, : len(prompt)] = IGNORED
        losses = losses + policy(tokens, labels=labels).loss * batch.response_lengths[row]
    (losses / batch.tokens).backward()
    ours = gradients_of(job, serial(job, 1, 1, ("actor",)), 1, batch)
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        scale = float(parameter.grad.abs().max())
        assert ours[f"actor:{name}"] == pytest.approx(parameter.grad, abs=2e-5 * scale), name
