"""Checks `engineArgs.speculative_config`: vLLM drafts by itself, with heads of the policy or a model on its device.

Rule: vLLM's drafters with a model are allowed, on GPUs.
"""

from typing import Any, Final

from rlhf_api.job.groups import Speculation
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.speculation.drafter import MAX_DRAFT
from rlhf_workers.models.loading import readable_folder

NAME: Final = "speculative_config"
FIELD: Final = f"spec.generation.engineArgs.{NAME}"
DRAFT_MODEL: Final = "draft_model"
METHODS: Final = ("eagle", "eagle3", "mtp", DRAFT_MODEL)
FIELDS: Final = ("method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", "quantization")


def speculation_arguments(settings: Any, device_type: str, speculation: Speculation) -> dict[str, Any]:
    """Return vLLM's arguments for its own drafter; WorkError with the field and the remedy."""
    if device_type == "cpu":
        raise _refused(
            "",
            "vLLM's own drafters are for GPUs: on a CPU passes of heads or a draft model cost what they gain; name "
            "drafters in spec.generation.speculation.drafters, which draft where that was measured to be faster",
        )
    if speculation.mode == "Disabled":
        raise _refused("", "contradicts spec.generation.speculation.mode: Disabled; remove one of them")
    if not isinstance(settings, dict):
        raise _refused("", f"{settings!r} must be a mapping such as {{method: eagle3, model: /models/heads}}")
    for name in settings:
        if name not in FIELDS:
            raise _refused(
                f".{name}",
                f"{settings[name]!r} cannot be set: {', '.join(FIELDS)} can, because the worker verifies the tokens",
            )
    method = settings.get("method")
    if method not in METHODS:
        raise _refused(
            ".method",
            f"{method!r} must be one of {', '.join(METHODS)}; drafts from tokens are those of "
            "spec.generation.speculation.drafters",
        )
    tokens = settings.get("num_speculative_tokens", speculation.max_tokens)
    if type(tokens) is not int or not 1 <= tokens <= MAX_DRAFT:
        raise _refused(".num_speculative_tokens", f"{tokens!r} must be a number from 1 to {MAX_DRAFT}")
    config = {**settings, "num_speculative_tokens": tokens}
    if method != "mtp" or "model" in settings:
        config["model"] = str(readable_folder(str(settings.get("model", "")), f"{FIELD}.model"))
    return config


def _refused(below: str, why: str) -> WorkError:
    field = f"{FIELD}{below}"
    return WorkError("EngineArgument", f"{field}: {why}", field=field, exit_code=ExitCode.USAGE)
