"""Translates vLLM's errors for users: which field to change, and whether a restart may help. Pure."""

from typing import Final

from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError, describe, is_out_of_memory

ACTOR_FIELD: Final = "spec.models.actor.path"
ARGUMENTS: Final = "spec.generation.engineArgs"
NO_ROOM: Final = ("larger than the available KV cache", "No available memory for the cache blocks")
"""Parts of vLLM's messages when one longest sequence does not fit into its caches."""
TAKEN: Final = ("is less than desired GPU memory utilization",)
"""Parts of vLLM's messages when other processes use the device's memory."""


def build_failure(error: Exception, path: str, longest: int) -> WorkError:
    """Return the failure when vLLM cannot serve the model in the folder `path`; `longest`: tokens of a sequence."""
    said = describe(error)
    if any(text in said for text in NO_ROOM):
        message = (
            f"vLLM has no room for the cache of one sequence of {longest} tokens (spec.rollout.maxPromptTokens + "
            f"maxResponseTokens): raise {ARGUMENTS}.gpu_memory_utilization or spec.generation.parallelism.tensor, or "
            f"lower spec.rollout.maxResponseTokens; {said}"
        )
        return WorkError("CacheTooSmall", message, field="spec.rollout.maxResponseTokens", exit_code=ExitCode.USAGE)
    if any(text in said for text in TAKEN):
        message = (
            f"other processes use the memory of the device: lower {ARGUMENTS}.gpu_memory_utilization, or give the "
            f"worker a device of its own; {said}"
        )
        return WorkError("OutOfMemory", message, field=f"{ARGUMENTS}.gpu_memory_utilization", retryable=True)
    if is_out_of_memory(error):
        message = f"vLLM ran out of memory while it loaded {path}: raise spec.generation.parallelism.tensor; {said}"
        return WorkError("OutOfMemory", message, field="spec.generation.parallelism.tensor", retryable=True)
    message = f"vLLM cannot serve {path}: {said}"
    return WorkError("EngineUnavailable", message, field=ACTOR_FIELD, exit_code=ExitCode.USAGE)
