"""Selects vLLM's batch-invariant kernels for `deterministic: true`, if the device has them.

Rule: a job that cannot be deterministic is refused with field, value and reason. Must never import vLLM itself.
"""

import os
import sys
from typing import Final

import torch

from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError

FIELD: Final = "spec.deterministic"
VARIABLE: Final = "VLLM_BATCH_INVARIANT"
CAPABILITY: Final = (8, 0)
"""Lowest compute capability on which this project uses vLLM's batch-invariant kernels: Ampere."""


def obstacle(device: torch.device) -> str:
    """Return why vLLM's results depend on the batch on this device; empty if they need not."""
    if device.type == "cpu":
        return "vLLM's kernels for CPU sum in an order that depends on the batch; use spec.generation.engine torch"
    if device.type != "cuda":
        return f"vLLM has no batch-invariant kernels for {device.type}; use spec.generation.engine torch"
    have = torch.cuda.get_device_capability(device)
    if have < CAPABILITY:
        return (
            f"vLLM's batch-invariant kernels need compute capability {_dotted(CAPABILITY)}, "
            f"{torch.cuda.get_device_name(device)} has {_dotted(have)}; use spec.generation.engine torch"
        )
    return ""


def require_batch_invariance(device: torch.device) -> None:
    """Select vLLM's batch-invariant kernels for this process; WorkError NotReproducible if that is impossible.

    Must be called before vLLM is imported.
    """
    why = obstacle(device)
    if not why and "vllm" in sys.modules and os.environ.get(VARIABLE) != "1":
        why = f"vLLM was imported without {VARIABLE}=1, which it reads only then; set it in the worker's environment"
    if why:
        message = f"{FIELD}: true cannot be guaranteed: {why}"
        raise WorkError("NotReproducible", message, field=FIELD, exit_code=ExitCode.USAGE)
    os.environ[VARIABLE] = "1"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
