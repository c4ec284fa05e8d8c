"""`engineArgs` of vLLM: accepted and rejected arguments with reasons, and additional ones on a CPU."""

from typing import Any, Final, Literal

import pytest

from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineLimits
from rlhf_workers.generation.vllm_engine.arguments import (
    CPU_BLOCK,
    CPU_MEMORY_SHARE,
    OWNED,
    cpu_defaults,
    engine_arguments,
)

KNOWN: Final[dict[str, Any]] = {
    "max_num_batched_tokens": int | None,
    "enforce_eager": bool,
    "gpu_memory_utilization": float,
    "scheduling_policy": Literal["fcfs", "priority"],
    "compilation_config": None,
    "enable_prefix_caching": bool | None,
    **dict.fromkeys(OWNED, str),
}
LIMITS: Final = EngineLimits(max_batch_size=4, max_prompt_tokens=40, max_response_tokens=50)
GIBIBYTE: Final = 2**30


def arguments(**user_arguments: Any) -> dict[str, Any]:
    return engine_arguments(user_arguments, KNOWN, "/models/a", "bfloat16", LIMITS, 2)


def test_what_is_given_passes_untouched_beside_what_follows_from_the_manifest() -> None:
    user_arguments = {
        "max_num_batched_tokens": 512,
        "enforce_eager": True,
        "gpu_memory_utilization": 1,
        "compilation_config": {"level": 3},
    }
    passed = arguments(**user_arguments)
    assert {name: passed[name] for name in user_arguments} == user_arguments
    assert (passed["model"], passed["dtype"]) == ("/models/a", "bfloat16")
    assert (passed["config_format"], passed["load_format"]) == ("hf", "safetensors"), "not Mistral's own files"
    assert (passed["max_model_len"], passed["max_num_seqs"], passed["tensor_parallel_size"]) == (90, 4, 2)
    assert passed["enable_prefix_caching"]
    assert not arguments(enable_prefix_caching=False)["enable_prefix_caching"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_num_batched_token", 512, "512: vLLM has no such argument: did you mean max_num_batched_tokens?"),
        ("quite_other", 1, "take a field of its EngineArgs, such as max_num_batched_tokens"),
        ("max_num_batched_tokens", "512", "'512' should be a valid integer"),
        ("enforce_eager", 1, "1 should be a valid boolean"),
        ("scheduling_policy", "lifo", "'lifo' should be 'fcfs' or 'priority'"),
        ("model", "/other", "'/other' cannot be set for vLLM: spec.models.actor.path sets it"),
        ("dtype", "half", "spec.training.precision sets it for generation"),
        ("load_format", "dummy", "the first weights come from the folder"),
        ("async_scheduling", True, "each token bears the weights that drew it"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value_and_what_would_be_right(name: str, value: Any, words: str) -> None:
    with pytest.raises(WorkError) as raised:
        arguments(**{name: value})
    assert words in str(raised.value)
    assert raised.value.failure.field == f"spec.generation.engineArgs.{name}"
    assert str(raised.value).startswith(f"spec.generation.engineArgs.{name}: ")


def test_a_cpu_keeps_caches_for_a_full_batch() -> None:
    defaults = cpu_defaults({}, 1000, LIMITS, 100 * GIBIBYTE)
    assert defaults["block_size"] == CPU_BLOCK
    assert defaults["kv_cache_memory_bytes"] >= 4 * 96 * 1000, "90 tokens are three blocks of 32"
    assert defaults["kv_cache_memory_bytes"] < 8 * 96 * 1000


def test_a_cpu_keeps_no_more_caches_than_there_is_room_for_and_some_sample_always_fits() -> None:
    tight = cpu_defaults({}, GIBIBYTE, LIMITS, 200 * GIBIBYTE)["kv_cache_memory_bytes"]
    assert tight == max(200 * CPU_MEMORY_SHARE, 2 * 96) * GIBIBYTE
    assert cpu_defaults({}, GIBIBYTE, LIMITS, 0)["kv_cache_memory_bytes"] >= 96 * GIBIBYTE


def test_who_says_how_much_of_the_memory_vllm_may_have_is_heard() -> None:
    assert "kv_cache_memory_bytes" not in cpu_defaults({"gpu_memory_utilization": 0.3}, 1000, LIMITS, GIBIBYTE)
