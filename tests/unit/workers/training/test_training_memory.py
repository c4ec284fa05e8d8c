"""The estimate of a training rank's memory against what the trainer keeps, tensor by tensor, on a CPU."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.support import models
from tests.support.training_ranks import CPU, Alone, make_job, serial

from rlhf_api import control_pb2 as pb
from rlhf_planner.training_memory import StageTraining, kept_by_head, kept_by_layers, shape_of, training_memory
from rlhf_workers.training.backends.torch_backend import build_trainer
from rlhf_workers.training.step_timing import activation_bytes, made_up_work
from rlhf_workers.training.trainer import Trainer

PROMPT, RESPONSE, SAMPLES = 24, 40, 2
"""Made-up samples are half as long as the longest that the job allows."""


def trainer_of_shape(folder: Path, family: str, deterministic: bool, **training: Any) -> Trainer:
    policy = models.write_policy(
        folder / family,
        family,
        seed=1,
        num_hidden_layers=4,
        hidden_size=96,
        intermediate_size=160,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=512,
    )
    job = make_job(
        policy,
        policy,
        deterministic=deterministic,
        training={"microBatchSize": SAMPLES, **training},
        rollout={"batchSize": 8, "maxPromptTokens": 2 * PROMPT, "maxResponseTokens": 2 * RESPONSE},
    )
    become = pb.BecomeTraining(rank=0, world_size=1, schedule=serial(job, 1, 1).model_dump_json())
    return build_trainer(job, become, CPU, lambda _: Alone(), lambda *_, **__: None)


CASES = [
    ("llama", "Float32", False, False),
    ("llama", "BFloat16", True, False),
    ("qwen2", "Float32", False, True),
    ("qwen3", "Float32", True, False),
    ("qwen3", "BFloat16", False, False),
    ("mistral", "BFloat16", False, True),
    ("gemma2", "BFloat16", True, False),
]


@pytest.mark.parametrize(("family", "precision", "deterministic", "recompute"), CASES)
def test_what_a_stage_keeps_is_estimated_within_a_twentieth(
    tmp_path: Path, family: str, precision: str, deterministic: bool, recompute: bool
) -> None:
    trainer = trainer_of_shape(tmp_path, family, deterministic, precision=precision, activationCheckpointing=recompute)
    work = made_up_work(trainer)
    shape = shape_of(json.loads((tmp_path / family / "config.json").read_text()))
    heads: tuple[tuple[int, Literal["lm", "value"]], ...] = ((0, "lm"), (1, "value"))
    for index, head in heads:
        stage = StageTraining(
            shape, 1, 0, head, SAMPLES, PROMPT + RESPONSE, RESPONSE,
            half=precision == "BFloat16", recompute=recompute, written_out=deterministic, on_gpu=False,
        )  # fmt: skip
        counted = activation_bytes(trainer, work, index, 0)
        assert kept_by_layers(stage) + kept_by_head(stage) == pytest.approx(counted, rel=0.05)
        model = ("actor", "critic")[index]
        parameters = sum(value.numel() for value in trainer.optimizers[model, 0].parameters.values())
        assert stage.parameters == pytest.approx(parameters, rel=0.02)


def test_recomputing_keeps_less_and_parts_add_up() -> None:
    shape = shape_of(
        {
            "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128_256, "tie_word_embeddings": True,
        }
    )  # fmt: skip
    kept, again = (
        training_memory(StageTraining(shape, 1, 0, "lm", 8, 1024, 512, half=True, recompute=recompute))
        for recompute in (False, True)
    )
    assert again["activations"] < kept["activations"] / 8
    assert again["weights, gradients, moments"] == kept["weights, gradients, moments"] == 16 * 1_235_746_816
    assert kept["logits"] > 2 * 8 * 512 * 128_256
