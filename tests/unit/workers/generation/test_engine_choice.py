"""The engine that `Auto` selects, and its reason: the first that applies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.workers.generation_roles import generation_job

from rlhf_common.metrics import labels
from rlhf_workers.generation.engine_choice import (
    NOT_INSTALLED,
    TORCH_ARGUMENTS,
    WorkerMeans,
    choose_engine,
    unregistered,
    unsupported_by_vllm,
)
from rlhf_workers.generation.engine_registry import chosen_engine
from rlhf_workers.generation.torch_engine import build as torch_build

LACKS = "vLLM has no model OwnModel"


@pytest.mark.parametrize(
    ("generation", "deterministic", "device", "why", "engine", "reason"),
    [
        ({"engine": "torch"}, False, "cuda", "", "torch", "Named"),
        ({"engine": "vllm"}, True, "cpu", LACKS, "vllm", "Named"),
        ({"engine": "my_package.my_engine"}, False, "cuda", "", "my_package.my_engine", "Named"),
        ({"parallelism": {"tensor": 2}}, False, "cuda", "", "vllm", "TensorParallel"),
        ({"engineArgs": {"max_num_batched_tokens": 4096}}, False, "cpu", "", "vllm", "EngineArgs"),
        ({"engineArgs": {"attention": "sdpa"}}, False, "cuda", "", "torch", "EngineArgs"),
        ({}, False, "cpu", "", "torch", "NoGpu"),
        ({}, True, "cuda", "", "torch", "Deterministic"),
        ({}, False, "cuda", NOT_INSTALLED, "torch", "NotServed"),
        ({}, False, "cuda", LACKS, "torch", "NotServed"),
        ({}, False, "cuda", "", "vllm", "Served"),
    ],
)
def test_the_first_reason_that_holds_chooses(
    generation: dict[str, Any], deterministic: bool, device: str, why: str, engine: str, reason: str, tmp_path: Path
) -> None:
    spec = generation_job(tmp_path, deterministic=deterministic, **{"engine": "Auto", **generation}).spec
    choice = choose_engine(spec, WorkerMeans(device, lambda: why))
    assert (choice.engine, choice.reason) == (engine, reason)
    assert reason != "NotServed" or choice.message == why
    assert reason in labels.ENGINE_REASON.values


def test_auto_is_what_a_manifest_without_an_engine_says_and_torch_where_there_is_no_gpu(tmp_path: Path) -> None:
    spec = generation_job(tmp_path).spec
    assert spec.generation.engine == "Auto"
    assert chosen_engine(spec, torch.device("cpu")).engine == "torch"


def test_a_model_is_served_when_one_of_its_architectures_is() -> None:
    assert unregistered(["Own", "LlamaForCausalLM"], {"LlamaForCausalLM"}) == ""
    assert unregistered(["OwnModel"], {"LlamaForCausalLM"}) == LACKS
    assert "config.json that names no architecture" in unregistered([], {"LlamaForCausalLM"})


def test_an_image_without_vllm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_workers.generation.engine_choice.find_spec", lambda name: None)
    assert unsupported_by_vllm(["LlamaForCausalLM"]) == NOT_INSTALLED


def test_arguments_of_torch_are_those_that_its_engine_takes() -> None:
    assert {"dtype", "attention", *torch_build.PASS_ARGUMENTS} == TORCH_ARGUMENTS
