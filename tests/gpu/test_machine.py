"""The limits of the machine, to which other steps relate their figures; each is measured alone."""

from functools import partial

import pytest
import torch
from tests.gpu.timing import best_seconds, name_of

from gpu_check.plugin import CheckedMachine, Figures


@pytest.mark.gpu(seconds=60)
def test_machine(machine: CheckedMachine, figures: Figures) -> None:
    """The limits of this machine: arithmetic, memory, and the bus each way."""
    device, repeats, rows = machine.device, machine.sized(3, 5), machine.sized(256, 8192)
    if machine.cuda:
        free, total = torch.cuda.mem_get_info(device)
        figures.add("free_gb", free / 1e9, "GB")
        figures.add("memory_gb", total / 1e9, "GB")
        figures.check("the GPU is free", free > 0.9 * total, f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free")
        figures.check("bfloat16 is computed by the device itself", machine.bfloat16, str(machine.bfloat16))
    for dtype in (torch.bfloat16, torch.float32) if machine.cuda else (torch.float32,):
        first, second = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
        seconds = best_seconds(partial(torch.matmul, first, second), repeats, device)
        figures.add(f"{name_of(dtype)}_tflops", 2 * rows**3 / seconds / 1e12, "TFLOP/s")
    source = torch.ones(machine.sized(16, 2048) << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    figures.add("memory_gb_per_second", copied_bytes(target, source, repeats) / 1e9, "GB/s, read and written")
    if not machine.cuda:
        return
    for kind, pinned in (("pinned", True), ("pageable", False)):
        host = torch.ones(source.numel(), dtype=torch.uint8, pin_memory=pinned)
        figures.add(f"{kind}_to_device_gb_per_second", copied_bytes(target, host, repeats) / 2e9, "GB/s")
        figures.add(f"{kind}_to_host_gb_per_second", copied_bytes(host, source, repeats) / 2e9, "GB/s")
    small = torch.ones(1, device=device)
    seconds = best_seconds(small.item, 10 * repeats, device)
    figures.add("microseconds_of_an_item", 1e6 * seconds, "us, one number fetched from the device")


def copied_bytes(target: torch.Tensor, source: torch.Tensor, repeats: int) -> float:
    """Return the bytes per second that a copy reads and writes."""
    device = target.device if target.is_cuda else source.device
    seconds = best_seconds(partial(target.copy_, source, non_blocking=True), repeats, device)
    return 2 * source.numel() / seconds
