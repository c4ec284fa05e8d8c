"""The number type of matrix products of a job.

Rule: `compute_dtype` depends only on the manifest, never on the device of a role.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.groups import ComputeType

DTYPES: Final[dict[ComputeType, torch.dtype]] = {"Float32": torch.float32, "BFloat16": torch.bfloat16}


def shared_casts(device: torch.device, compute: torch.dtype) -> AbstractContextManager[None]:
    """Return a context in which `autocast` blocks share one cast of each weight; weights must not change inside."""
    if compute == torch.float32:
        return nullcontext()
    outer: AbstractContextManager[None] = torch.autocast(device.type, enabled=False)
    return outer


def casting(device: torch.device, compute: torch.dtype) -> AbstractContextManager[None]:
    """Return a context in which matrix products have type `compute`; float32 needs none."""
    if compute == torch.float32:
        return nullcontext()
    autocast: AbstractContextManager[None] = torch.autocast(device.type, dtype=compute)
    return autocast


def compute_dtype(spec: RLHFJobSpec) -> torch.dtype:
    """Return torch's type for `spec.compute_type`."""
    return DTYPES[spec.compute_type]


def as_multiplied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the type of products under autocast, or unchanged without autocast."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
