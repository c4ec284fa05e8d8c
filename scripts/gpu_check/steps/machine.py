"""The limits of the machine, which other steps relate their figures to: arithmetic, memory, and the bus each way."""

from dataclasses import dataclass
from functools import partial

import torch

from gpu_check.step import CheckedMachine, CheckStep, Report
from gpu_check.timing import best_seconds


@dataclass(frozen=True)
class MachineSizes:
    """Of what is multiplied and copied."""

    matrix: int
    """Rows and columns of the matrices."""
    copied_megabytes: int
    repeats: int


def run(machine: CheckedMachine, sizes: MachineSizes, report: Report) -> None:
    """Measures each limit on its own, nothing else running."""
    device = torch.device(machine.device)
    if machine.cuda:
        free, total = torch.cuda.mem_get_info(device)
        report.figure("free_gb", free / 1e9, "GB")
        report.figure("memory_gb", total / 1e9, "GB")
        report.check("the GPU is free", free > 0.9 * total, f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free")
        report.check("bfloat16 is computed by the device itself", machine.bfloat16, str(machine.bfloat16))
    dtypes = (torch.bfloat16, torch.float32) if machine.cuda else (torch.float32,)
    for dtype in dtypes:
        report.say(f"multiplying matrices in {dtype}")
        first = torch.randn(sizes.matrix, sizes.matrix, device=device).to(dtype)
        second = torch.randn(sizes.matrix, sizes.matrix, device=device).to(dtype)
        seconds = best_seconds(partial(torch.matmul, first, second), sizes.repeats, device)
        name = str(dtype).removeprefix("torch.")
        report.figure(f"{name}_tflops", 2 * sizes.matrix**3 / seconds / 1e12, "TFLOP/s")
    count = sizes.copied_megabytes << 20
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = best_seconds(lambda: target.copy_(source), sizes.repeats, device)
    report.figure("memory_gb_per_second", 2 * count / seconds / 1e9, "GB/s, read and written")
    if machine.cuda:
        host_copies(source, target, sizes.repeats, report)


def host_copies(source: torch.Tensor, target: torch.Tensor, repeats: int, report: Report) -> None:
    """Copies between host and device, by pinned and by pageable memory."""
    count = source.numel()
    for kind, pinned in (("pinned", True), ("pageable", False)):
        host = torch.ones(count, dtype=torch.uint8, pin_memory=pinned)
        seconds = best_seconds(partial(target.copy_, host, non_blocking=True), repeats, source.device)
        report.figure(f"{kind}_to_device_gb_per_second", count / seconds / 1e9, "GB/s")
        seconds = best_seconds(partial(host.copy_, source, non_blocking=True), repeats, source.device)
        report.figure(f"{kind}_to_host_gb_per_second", count / seconds / 1e9, "GB/s")
    small = torch.ones(1, device=source.device)
    seconds = best_seconds(lambda: small.item(), 10 * repeats, source.device)
    report.figure("microseconds_of_an_item", 1e6 * seconds, "us, one number fetched from the device")


STEP = CheckStep(
    "machine",
    "the limits of this machine: arithmetic, memory, and the bus each way",
    run,
    small=MachineSizes(matrix=256, copied_megabytes=16, repeats=3),
    gpu=MachineSizes(matrix=8192, copied_megabytes=2048, repeats=5),
    limit_seconds=60,
)
