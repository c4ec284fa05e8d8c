"""Measures the device of a training rank and the link between the ranks, for `rlhf plan`.

Rule: every rank of a group must measure the link at the same time; nothing else communicates.
"""

import math
import platform
import socket
import time
import zlib
from collections.abc import Callable
from typing import Any, Final

import torch

from rlhf_workers.devices.host_copies import wait_for
from rlhf_workers.training.communication.transport import BOOT_ID
from rlhf_workers.training.trainer import Trainer

REPEATS: Final = 4
"""Maximum timed runs of each operation."""
PART_SECONDS: Final = 0.2
"""Limit in seconds: another run starts only if all together should take less, and more samples are timed only while a
run takes less."""
SUMMED_BYTES: Final = {"cpu": (4 * 2**10, 2**20), "cuda": (64 * 2**10, 64 * 2**20)}
"""Device -> bytes of the timed sums, a small and a large one."""
PRODUCT_ROWS: Final = {"cpu": 512, "cuda": 4096}
"""Device -> rows and columns of the multiplied matrices."""
COPIED_BYTES: Final = {"cpu": 2**25, "cuda": 2**28}
"""Device -> bytes of the copy in device memory."""
LEAST_SECONDS: Final = 1e-9
"""Least seconds that count for a part of a stage, and for the bytes of a large sum."""
Figures = dict[str, Any]


def measured_figure(value: float) -> Figures:
    """Return a figure of a document of costs."""
    return {"value": value, "source": "measured"}


def device_name(device: torch.device) -> str:
    """Return the name of the device for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU core ({platform.machine()})"


def shortest(run: Callable[[], float], *, warm: bool = False) -> float:
    """Return the shortest of some runs, after a warm-up unless it is `warm`; `run` returns its seconds."""
    if not warm:
        run()
    times = [run()]
    while len(times) < REPEATS and min(times) * (len(times) + 1) < PART_SECONDS:
        times.append(run())
    return min(times)


def clocked(device: torch.device, work: Callable[[], object]) -> Callable[[], float]:
    """Return `work` as a function that returns its seconds."""

    def run() -> float:
        begun = time.perf_counter()
        work()
        wait_for(device)
        return time.perf_counter() - begun

    return run


def operations_per_second(device: torch.device, compute: torch.dtype) -> float:
    """Return the operations per second of a matrix product in a number type."""
    rows = PRODUCT_ROWS[device.type]
    matrix = torch.full((rows, rows), 0.5, dtype=compute, device=device)
    return 2 * rows**3 / shortest(clocked(device, lambda: matrix @ matrix))


def copied_bytes_per_second(device: torch.device) -> float:
    """Return the bytes per second that a copy within device memory reads and writes."""
    source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / shortest(clocked(device, lambda: target.copy_(source)))


def link_figures(trainer: Trainer) -> Figures:
    """Return the link between the ranks from sums of two sizes, as `between` if they are on several hosts, else as
    `inside`; empty for one rank.
    """
    layout, device = trainer.layout, trainer.device
    ranks = tuple(range(layout.world))
    if len(ranks) < 2:
        return {}
    hosts = torch.tensor([host_number(), -host_number()], dtype=torch.float64, device=device)
    trainer.communicator.all_reduce_max(hosts, ranks)
    small, large = SUMMED_BYTES[device.type]
    times = {}
    for size in (small, large):
        values = torch.zeros(size // 4, device=device)
        trainer.communicator.all_reduce_sum(values, ranks)
        fastest = math.inf
        for _ in range(REPEATS):
            trainer.barrier()
            begun = time.perf_counter()
            trainer.communicator.all_reduce_sum(values, ranks)
            wait_for(device)
            fastest = min(fastest, time.perf_counter() - begun)
        times[size] = fastest
    share = 2 * (len(ranks) - 1) / len(ranks)
    per_byte = max((times[large] - times[small]) / (large - small), LEAST_SECONDS / large)
    latency = max(0.0, times[small] - small * per_byte) / (2 * math.log2(len(ranks)))
    link = {"bandwidth": measured_figure(share / per_byte), "latency": measured_figure(latency)}
    return {"inside" if float(hosts.sum()) == 0 else "between": link}


def host_number() -> int:
    """Return a number of this rank's host, below 2**32."""
    try:
        name = BOOT_ID.read_bytes()
    except OSError:
        name = socket.gethostname().encode()
    return zlib.crc32(name)
