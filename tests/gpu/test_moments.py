"""AdamW's moments in host memory: the same bits as on the device, the memory they need, and the time of a step."""

import time
from typing import Final

import pytest
import torch
from tests.gpu.timing import begin_peak, peak_bytes, wait_for

from gpu_check.plugin import CheckedMachine, Figures
from rlhf_api.job.groups import Optimizer
from rlhf_planner.device_memory import OFFLOADED_PIECE_BYTES, OFFLOADED_PIECES
from rlhf_workers.training.optimizers.adamw import AdamW, DeviceAdamW, HostAdamW
from rlhf_workers.weights.offload import DeviceOffload

STEPS: Final = 4
RATE: Final = 1e-3
SPARE_BYTES: Final = 16 * 2**20
"""Bytes of the device besides the parts: counts of steps, and the allocator's rounding."""
GIGABYTE: Final = 1e9


@pytest.mark.gpu(seconds=60, gigabytes=10)
def test_moments(machine: CheckedMachine, figures: Figures) -> None:
    """Moments in host memory are stepped to the same bits, two pieces of them on the device at once."""
    device, fields = machine.device, Optimizer(weight_decay=0.1)
    rows, columns, piece_bytes = machine.sized((70, 30, 4096), (32768, 8191, OFFLOADED_PIECE_BYTES))
    ours, theirs = (_parameters(rows, columns, device) for _ in range(2))
    host: AdamW = HostAdamW(ours, fields, DeviceOffload(device), piece_bytes)
    beside: AdamW = DeviceAdamW(theirs, fields)
    figures.add("host_gb", host.host_bytes / GIGABYTE, "GB")
    for number in range(STEPS):
        for way, adamw, parameters in (("host", host, ours), ("device", beside, theirs)):
            _fill_gradients(parameters, number)
            before, started = begin_peak(device), time.monotonic()
            adamw.step(RATE)
            wait_for(device)
            seconds = time.monotonic() - started
            rate = 2 * host.host_bytes / seconds / GIGABYTE if way == "host" else 0.0
            figures.row("steps", step=number, moments=way, seconds=seconds, gb_per_second=rate)
            if machine.cuda and way == "host":
                peak, most = peak_bytes(device) - before, OFFLOADED_PIECES * piece_bytes + SPARE_BYTES
                figures.check(f"two pieces are on the device ({number})", peak <= most, f"{peak / GIGABYTE:.3f} GB")
    wrong = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    figures.check("weights are the same bits", not wrong, ", ".join(wrong) or f"{len(ours)} tensors")
    for name in ours:
        there = beside.moments(name)
        wrong += [moment for moment, value in host.moments(name).items() if not torch.equal(value, there[moment].cpu())]
    figures.check("moments are the same bits", not wrong, ", ".join(wrong) or f"{len(ours)} tensors")


def _parameters(rows: int, columns: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return parameters with a value and room for a gradient; the large matrix ends within a part."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = {"matrix": (rows, columns), "odd": (37, 29), "norm": (columns,), "one": (1,)}
    parameters = {name: torch.randn(shape, generator=generator, device=device) for name, shape in shapes.items()}
    for value in parameters.values():
        value.requires_grad_()
        value.grad = torch.zeros_like(value)
    return parameters


def _fill_gradients(parameters: dict[str, torch.Tensor], step: int) -> None:
    for name, value in parameters.items():
        generator = torch.Generator(value.device).manual_seed(step * 100 + len(name))
        assert value.grad is not None
        value.grad.normal_(generator=generator)
