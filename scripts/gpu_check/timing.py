"""Measures how long work takes on a device.

Rule: the least of several calls after a warm-up is the figure, since what disturbs a measurement only adds to it; a GPU
is waited for before the clock is read.
"""

import time
from collections.abc import Callable

import torch


def wait_for(device: torch.device) -> None:
    """Returns when the device has done all it was given."""
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
