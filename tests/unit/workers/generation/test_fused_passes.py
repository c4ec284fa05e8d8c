"""Fused passes equal the model's, over its own weights, or they are not used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.model_folders.models import write_policy
from tests.support.workers.engine_driving import MakeEngine

from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import SamplingParameters
from rlhf_workers.generation.torch_engine import forward_choice
from rlhf_workers.generation.torch_engine.capture import DirectCapture
from rlhf_workers.generation.torch_engine.decode_ops import TorchOps
from rlhf_workers.generation.torch_engine.forward import CausalForward
from rlhf_workers.generation.torch_engine.forward_choice import static_forward
from rlhf_workers.generation.torch_engine.fused_forward import FusedForward, NotFusedError, fused_forward_for
from rlhf_workers.models.loading import load_causal_lm, replace_weights

CPU = torch.device("cpu")


def forward_of(folder: Path, dtype: torch.dtype = torch.float32) -> CausalForward:
    model = load_causal_lm(str(folder), field="model", dtype=dtype, device=CPU, attention="eager")
    forward = CausalForward(model, "model")
    forward.verify()
    return forward


def test_bfloat16_agrees_with_the_model(policy: Callable[[str], Path]) -> None:
    assert fused_forward_for(forward_of(policy("qwen2"), torch.bfloat16), TorchOps())


def test_weights_written_to_the_model_are_those_that_decode(policy: Callable[[str], Path], tmp_path: Path) -> None:
    forward = forward_of(policy("qwen3"))
    fused = fused_forward_for(forward, TorchOps())
    other = forward_of(write_policy(tmp_path / "other", "qwen3", seed=8))
    before = {name: tensor.data_ptr() for name, tensor in forward.model.named_parameters()}
    replace_weights(forward.model, dict(other.model.named_parameters()), subject="actor version 2")
    assert {name: tensor.data_ptr() for name, tensor in forward.model.named_parameters()} == before
    fused.verify(other)
    with pytest.raises(NotFusedError, match="logits differ"):
        fused.verify(forward_of(policy("qwen3")))


def test_released_weights_may_move_and_are_found_again(policy: Callable[[str], Path]) -> None:
    forward = forward_of(policy("llama"))
    fused = fused_forward_for(forward, TorchOps())
    fused.release()
    for parameter in forward.model.parameters():  # what offloading and onloading does
        parameter.data = parameter.data.clone()
    for parameter in forward.model.parameters():
        parameter.mul_(1.5)
    fused.verify(forward)


@pytest.mark.parametrize(
    ("architecture", "changes", "why"),
    [
        ("gemma2", {}, "gemma2 is not one of llama"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        ("llama", {"mlp_bias": True}, "no plain matrices"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
            "its rotary embedding is dynamic",
        ),
    ],
)
def test_other_models_are_said_to_be_others(
    architecture: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    forward = forward_of(write_policy(tmp_path / "policy", architecture, **changes))
    with pytest.raises(NotFusedError, match=why):
        FusedForward(forward, TorchOps())
    sampling = SamplingParameters()
    assert static_forward(forward, sampling, "Auto", DirectCapture()) is forward
    assert static_forward(forward, sampling, "Disabled", DirectCapture()) is forward
    with pytest.raises(WorkError, match=f"engineArgs.fusedKernels: .*{why}"):
        static_forward(forward, sampling, "Enabled", DirectCapture())


@pytest.mark.parametrize("fused_is_faster", [True, False])
def test_auto_takes_what_was_measured_to_be_faster(
    fused_is_faster: bool, policy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = forward_of(policy("mistral"))
    measured = forward_choice.pass_seconds(forward, SamplingParameters(), DirectCapture())
    assert 0 < measured < 10

    def seconds(way: Any, *_: Any) -> float:
        return 0.5 if isinstance(way, FusedForward) == fused_is_faster else 1.0

    monkeypatch.setattr(forward_choice, "pass_seconds", seconds)
    chosen = static_forward(forward, SamplingParameters(), "Auto", DirectCapture())
    assert isinstance(chosen, FusedForward) == fused_is_faster


def test_kernels_that_compute_something_else_are_not_taken(
    policy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine
) -> None:
    monkeypatch.setattr(TorchOps, "silu_times", lambda _, gate_up: gate_up.chunk(2, dim=-1)[0])
    forward = forward_of(policy("llama"))
    with pytest.raises(NotFusedError, match="logits differ by"):
        fused_forward_for(forward, TorchOps())
    monkeypatch.setattr(TorchOps, "silu_times", lambda _, gate_up: 1 / 0)
    with pytest.raises(NotFusedError, match="ZeroDivisionError"):
        fused_forward_for(forward, TorchOps())
