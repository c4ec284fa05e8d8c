"""What the worker says of its device: name, memory it has, memory it uses.

Rule: reads counters only; must never change a device's state.
"""

import os
import platform
from functools import cache
from pathlib import Path

import torch

from rlhf_api.names import Env
from rlhf_workers.settings import SettingsError

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def open_device(name: str) -> torch.device:
    """`cpu` or `cuda:N`; SettingsError when this machine has no such device."""
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"{Env.DEVICE}={name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


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
