"""Measures the time of work on a device, and its memory.

Owns the rule that the figure is the least of several calls after a warm-up, since disturbances only add to a
measurement. It must never read the clock before a GPU has finished its work.
"""

import gc
import time
from collections.abc import Callable

import torch


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a number type for figures."""
    return str(dtype).removeprefix("torch.")


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the least seconds of `repeats` calls, after one that is not counted."""
    work()
    best = float("inf")
    for _ in range(repeats):
        wait_for(device)
        started = time.perf_counter()
        work()
        wait_for(device)
        best = min(best, time.perf_counter() - started)
    return best


def free_cache() -> None:
    """Free unreferenced memory; trainers and engines refer to themselves."""
    gc.collect()
    torch.cuda.empty_cache()


def begin_peak(device: torch.device) -> int:
    """Start counting the peak of memory; return the present bytes of tensors, 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def peak_bytes(device: torch.device) -> int:
    """Return the peak bytes of tensors on the device, 0 on a CPU."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0
