"""The worker's device: opening it, its name, its memory, and the process's share of free memory."""

import os
import platform
from functools import cache
from pathlib import Path
from typing import Final

import torch

from rlhf_common.names import Env
from rlhf_workers.settings import SettingsError

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


CUBLAS_WORKSPACE: Final = ":4096:8"
"""8 buffers of 4 MiB. Without this setting, matrix products may differ from run to run."""

_sharers: dict[torch.device, int] = {}
"""Number of processes on a device, including this one; set when the process opens the device."""


def open_device(name: str, sharers: int = 1) -> torch.device:
    """Return `cpu` or `cuda:N`, used by `sharers` processes. Raises SettingsError if this machine has no such
    device."""
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"{Env.DEVICE}={name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda":
        # Read once, at the first matrix product; only later is it known whether a job is deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    _sharers[device] = sharers
    return device


def compute_deterministically(device: torch.device) -> None:
    """Make this process choose GPU kernels with the same bits in every run, and warn of kernels without such a variant.
    For a CPU, do nothing."""
    if device.type == "cuda":
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)


def device_sharers(device: torch.device) -> int:
    """Return the number of processes on a device, including this one."""
    return _sharers.get(device, 1)


def free_memory(device: torch.device) -> int:
    """Return the GPU bytes on which this process may count: the unused part of its allocator's reserve, and its share
    of the memory that no process uses.
    """
    free = torch.cuda.mem_get_info(device)[0] // device_sharers(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def unused_memory(device: torch.device) -> int | None:
    """Return the GPU bytes that no process uses; None on a CPU."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use on a GPU by all processes; on a CPU those of this process."""
    unused = unused_memory(device)
    return used_memory(device) if unused is None else device_memory(device) - unused


@cache
def device_name(device: torch.device) -> str:
    """Return the product name of the GPU or CPU; the machine type if the CPU has none."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@cache
def device_memory(device: torch.device) -> int:
    """Return the total bytes of a GPU's memory; on a CPU those of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")


def used_memory(device: torch.device) -> int:
    """Return the bytes of this process: reserved by the allocator on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device)) if torch.cuda.is_initialized() else 0
    return PAGE_BYTES * int(Path("/proc/self/statm").read_text().split()[1])
