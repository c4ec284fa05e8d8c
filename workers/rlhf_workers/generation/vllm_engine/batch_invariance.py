"""Whether vLLM can keep `deterministic: true`, and how it is told to.

vLLM has kernels that give a row the same bits whatever the batch it is in. They are chosen by an environment variable
that modules of vLLM read while they are imported, and they are for GPUs: on a CPU the shape of a batch decides in which
order its kernels sum. Rule: what cannot be kept is refused before vLLM is imported, with field, value and reason; a job
never runs under a promise that does not hold. Must never import vLLM itself.
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
"""Compute capability of the oldest GPUs that vLLM's batch-invariant kernels are for: Ampere."""


def obstacle(device: torch.device) -> str:
    """Return why vLLM's results depend on the batch on this device; empty where they need not."""
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
    """Choose vLLM's batch-invariant kernels for this process; WorkError NotReproducible where there are none.

    To be called before vLLM is imported.
    """
    why = obstacle(device)
    if not why and "vllm" in sys.modules and os.environ.get(VARIABLE) != "1":
        why = f"vLLM was imported without {VARIABLE}=1, which it reads only then; set it in the worker's environment"
    if why:
        message = f"{FIELD}: true cannot be kept: {why}"
        raise WorkError("NotReproducible", message, field=FIELD, exit_code=ExitCode.USAGE)
    os.environ[VARIABLE] = "1"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
