"""Converts `engineArgs` of a manifest to vLLM's EngineArgs, and refuses arguments that the project owns. Pure.

A refusal names field, value and reason.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineLimits

FIELD: Final = "spec.generation.engineArgs"
_ONE_CORE: Final = "a worker is one engine; set spec.generation.replicas for more"
_MODEL: Final = (
    "model, tokenizer and code are those of spec.models.actor.path, on this machine, and nothing is run from it"
)
_SAMPLING: Final = "spec.rollout sets the sampling, and the worker samples"
_WEIGHTS: Final = "the first weights come from the folder, later weights from training"
_STEPS: Final = "the worker steps vLLM itself, so that each token bears the weights that drew it"
OWNED: Final[Mapping[str, str]] = {
    "model": "spec.models.actor.path sets it",
    "dtype": "spec.training.precision sets it for generation, too",
    "max_model_len": "spec.rollout.maxPromptTokens + maxResponseTokens sets it",
    "max_num_seqs": "spec.generation.maxBatchSize sets it",
    "seed": "samples draw tokens with their own keys, derived from spec.seed",
    "tensor_parallel_size": "spec.generation.parallelism.tensor sets it",
    "kv_transfer_config": "spec.fusion.interStage.transfer sets whether samples move with their caches",
    "runner": "the policy generates",
    "convert": "the policy generates",
    "enable_lora": "training publishes whole weights",
    **dict.fromkeys(("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "revision"), _MODEL),
    **dict.fromkeys(("code_revision", "trust_remote_code", "hf_token", "hf_config_path", "hf_overrides"), _MODEL),
    **dict.fromkeys(("config_format", "download_dir"), _MODEL),
    **dict.fromkeys(("load_format", "model_loader_extra_config", "weight_transfer_config"), _WEIGHTS),
    **dict.fromkeys(("logits_processors", "logprobs_mode", "generation_config"), _SAMPLING),
    **dict.fromkeys(("override_generation_config", "reasoning_parser", "structured_outputs_config"), _SAMPLING),
    **dict.fromkeys(("worker_cls", "worker_extension_cls", "scheduler_cls", "async_scheduling"), _STEPS),
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "data_parallel_backend", "nnodes"), _ONE_CORE),
    **dict.fromkeys(("node_rank", "master_addr", "master_port"), _ONE_CORE),
}
"""Reason why a manifest may not set an argument, by argument."""
WORKER_EXTENSION: Final = "rlhf_workers.generation.vllm_engine.worker_extension.WorkerExtension"
CPU_BLOCK: Final = 32
"""Tokens per cache block; vLLM's CPU kernels need multiples of it."""
CPU_MEMORY_SHARE: Final = 0.5
"""Share of the free memory that caches may take, or more if two longest sequences need it."""
CPU_SPARE: Final = 1.25
"""Cache size on a CPU relative to a full batch of longest sequences; the surplus stores prefixes."""


def engine_arguments(
    user_arguments: Mapping[str, Any],
    field_types: Mapping[str, Any],
    folder: str,
    dtype: str,
    limits: EngineLimits,
    tensor: int,
) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs that do not depend on the device; WorkError for a refused one.

    `field_types`: its fields with their types; None means that vLLM checks the value.
    """
    for name, value in user_arguments.items():
        if name in OWNED:
            raise _refused(name, f"{value!r} cannot be set for vLLM: {OWNED[name]}")
        if name not in field_types:
            near = get_close_matches(name, sorted(set(field_types) - set(OWNED)), 1)
            hint = (
                f"did you mean {near[0]}?" if near else "take a field of its EngineArgs, such as max_num_batched_tokens"
            )
            raise _refused(name, f"{value!r}: vLLM has no such argument: {hint}")
        if field_types[name] is not None:
            _require_type(name, value, field_types[name])
    return {
        "enable_prefix_caching": True,
        "async_scheduling": False,
        **user_arguments,
        "model": folder,
        "config_format": "hf",
        "load_format": "safetensors",
        "dtype": dtype,
        "max_model_len": limits.max_prompt_tokens + limits.max_response_tokens,
        "max_num_seqs": limits.max_batch_size,
        "tensor_parallel_size": tensor,
        "skip_tokenizer_init": True,
        "worker_extension_cls": WORKER_EXTENSION,
    }


def cpu_defaults(
    user_arguments: Mapping[str, Any], token_bytes: int, limits: EngineLimits, available_bytes: int
) -> dict[str, Any]:
    """Return a CPU's additional arguments. `token_bytes`: keys and values of one token in all layers.

    Caches are about CPU_SPARE times as large as a full batch needs, but at most CPU_MEMORY_SHARE of `available_bytes`
    or, if that is more, two longest sequences.
    """
    defaults: dict[str, Any] = {"block_size": CPU_BLOCK, "enforce_eager": True}
    if "gpu_memory_utilization" in user_arguments:
        return defaults
    longest = -(-(limits.max_prompt_tokens + limits.max_response_tokens) // CPU_BLOCK) * CPU_BLOCK * token_bytes
    wanted = int(longest * limits.max_batch_size * CPU_SPARE) + 2 * CPU_BLOCK * token_bytes
    room = min(wanted, max(int(available_bytes * CPU_MEMORY_SHARE), 2 * longest))
    return {**defaults, "kv_cache_memory_bytes": room}


def _require_type(name: str, value: Any, kind: Any) -> None:
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        says = " or ".join(dict.fromkeys(detail["msg"].removeprefix("Input ") for detail in error.errors()))
        raise _refused(name, f"{value!r} {says}") from None


def _refused(name: str, why: str) -> WorkError:
    field = f"{FIELD}.{name}"
    return WorkError("EngineArgument", f"{field}: {why}", field=field, exit_code=ExitCode.USAGE)
