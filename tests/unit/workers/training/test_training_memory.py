"""The estimate of a training rank's memory against the trainer's tensors, on a CPU."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.support.model_folders import models
from tests.support.training.training_ranks import CPU, Alone, make_job, serial

from rlhf_common import control_pb2 as pb
from rlhf_planner.training_memory import StageTraining, kept_by_head, kept_by_layers, training_memory
from rlhf_planner.transformer_shape import shape_of
from rlhf_workers.training.backends.torch_backend import build_trainer
from rlhf_workers.training.schedule.step_timing import activation_bytes, made_up_work
from rlhf_workers.training.trainer import Trainer

PROMPT, RESPONSE, SAMPLES = 24, 40, 2
"""Synthetic samples are half as long as the job's maximum."""


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
    ("mixtral", "Float32", True, False),
    ("mixtral", "BFloat16", False, False),
    ("qwen3_moe", "Float32", False, False),
    ("qwen3_moe", "BFloat16", True, True),
]


@pytest.mark.full(quick=3)
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
    stored, recomputed = (
        training_memory(StageTraining(shape, 1, 0, "lm", 8, 1024, 512, half=True, recompute=recompute))
        for recompute in (False, True)
    )
    assert recomputed["activations"] < stored["activations"] / 8
    assert recomputed["weights, gradients, moments"] == stored["weights, gradients, moments"] == 16 * 1_235_746_816
    assert stored["logits"] > 2 * 8 * 512 * 128_256


def test_experts_are_counted_by_their_own_widths() -> None:
    """Sizes of Qwen3-30B-A3B, with 30.5 billion parameters by its card, and of Mixtral 8x7B, with 46.7 billion."""
    qwen, mixtral = (
        shape_of(
            {
                "hidden_size": hidden, "num_attention_heads": 32, "head_dim": 128, "tie_word_embeddings": False,
                "intermediate_size": inner, "num_experts_per_tok": 8, **more,
            }
        )
        for hidden, inner, more in (
            (2048, 6144, {
                "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_key_value_heads": 4, "vocab_size": 151_936,
                "num_experts": 128, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
            }),
            (4096, 14_336, {
                "model_type": "mixtral", "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 32_000,
                "num_local_experts": 8,
            }),
        )
    )  # fmt: skip
    assert StageTraining(qwen, 1, 0, "lm", 1, 8, 4).parameters == pytest.approx(30.5e9, rel=2e-3)
    assert StageTraining(mixtral, 1, 0, "lm", 1, 8, 4).parameters == pytest.approx(46.7e9, rel=2e-3)
    stages = [StageTraining(qwen, 4, number, "lm", 1, 8, 4).parameters for number in range(4)]
    assert sum(stages) == StageTraining(qwen, 1, 0, "lm", 1, 8, 4).parameters


def test_layers_without_experts_are_told_by_their_numbers() -> None:
    config = {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 512, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "decoder_sparse_step": 2, "mlp_only_layers": [1],
    }  # fmt: skip
    shape = shape_of(config)
    assert shape.experts is not None
    assert shape.experts.dense == {0, 1, 2, 4}
    assert [StageTraining(shape, 2, number, "lm", 1, 8, 4).routed_layers for number in (0, 1)] == [0, 2]
    for name in ("decoder_sparse_step", "num_attention_heads", "num_experts", "moe_intermediate_size", "head_dim"):
        with pytest.raises(ValueError, match=rf"^{name} is 0.5, must be a whole number of at least \d$"):
            shape_of({**config, name: 0.5})
