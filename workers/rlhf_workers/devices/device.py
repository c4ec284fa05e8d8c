"""What the worker says of its device: name, memory it has, uses, and may yet use beside other processes.

Rule: reads counters only, and says how kernels are chosen; must never change a device's state. Where processes share a
device each counts on its part of what is free, or all of them would plan with the same bytes.
"""

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
"""8 buffers of 4 MiB, as many as it takes by itself on Hopper, but of one size: without that the products of a matrix
may differ from run to run."""

_sharers: dict[torch.device, int] = {}
"""Processes on a device, this one included, where there are several: a fact of the process, set when it opens one."""


def open_device(name: str, sharers: int = 1) -> torch.device:
    """`cpu` or `cuda:N`, on which `sharers` processes are; SettingsError when this machine has no such device."""
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"{Env.DEVICE}={name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda":
        # Read once, with the first matrix product; whether a job is deterministic is known only later.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    _sharers[device] = sharers
    return device


def compute_deterministically(device: torch.device) -> None:
    """Make this process choose kernels that give the same bits in every run, and warn of those that have no such
    variant. Nothing to do on a CPU, whose kernels do."""
    if device.type == "cuda":
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)


def device_sharers(device: torch.device) -> int:
    """Return the number of processes on a device, this one included."""
    return _sharers.get(device, 1)


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that this process may still count on: what its allocator holds back for later, and its
    part of what no process has."""
    free = torch.cuda.mem_get_info(device)[0] // device_sharers(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def unused_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU that no process has; None on a CPU."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use of a GPU, by whichever process; on a CPU those that this process holds."""
    unused = unused_memory(device)
    return used_memory(device) if unused is None else device_memory(device) - unused


@cache
def device_name(device: torch.device) -> str:
    """Return the product name of the GPU, or the machine type of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@cache
def device_memory(device: torch.device) -> int:
    """Return the bytes of memory that the device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")


def used_memory(device: torch.device) -> int:
    """Return the bytes that this process holds: reserved by the allocator of a GPU, resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device)) if torch.cuda.is_initialized() else 0
    return PAGE_BYTES * int(Path("/proc/self/statm").read_text().split()[1])
