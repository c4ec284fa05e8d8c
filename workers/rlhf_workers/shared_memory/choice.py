"""Chooses the kinds of memory that a worker lends and borrows, in order of preference.

Rule: a process has one object per kind and device.
"""

import logging
from collections.abc import Sequence
from functools import cache

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_workers.shared_memory.cuda_driver import CudaDriver, CudaDriverError
from rlhf_workers.shared_memory.cuda_regions import CudaSharing, GpuMemory
from rlhf_workers.shared_memory.host_regions import PRIVATE, HostSharing, MappedMemory
from rlhf_workers.shared_memory.regions import MemorySharing

log = logging.getLogger(__name__)


@cache
def driver_of(device: torch.device) -> CudaDriver | None:
    """Return the CUDA driver of a GPU; None for a CPU, and if the driver cannot be loaded."""
    if device.type != "cuda":
        return None
    try:
        return CudaDriver(device.index or 0)
    except CudaDriverError as error:
        log.warning("memory of %s is not shared, and none of the host is pinned for it: %s", device, error)
        return None


@cache
def lent_by(device: torch.device) -> tuple[MemorySharing, ...]:
    """Return the kinds of memory that a worker on `device` can lend, in order of preference."""
    driver = driver_of(device)
    if driver is None:
        return (HostSharing(),)
    return CudaSharing(driver, GpuMemory(device)), HostSharing(driver)


def private_memory(size: int, device: torch.device) -> MappedMemory:
    """Return `size` bytes of host memory of this process, at least 1, pinned for a GPU where possible."""
    return MappedMemory(PRIVATE, max(size, 1), driver_of(device), writable=True)


def borrowed_by(spec: RLHFJobSpec, device: torch.device) -> Sequence[MemorySharing]:
    """Return the kinds of memory that a worker borrows; none if `spec.training.weightSharing` is Disabled."""
    return () if spec.training.weight_sharing == "Disabled" else lent_by(device)
