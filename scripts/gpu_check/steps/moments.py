"""AdamW's moments in host memory: the bits of moments on the device, what of them is there, and what a step takes."""

import time
from dataclasses import dataclass
from typing import Final

import torch

from gpu_check.step import CheckedMachine, CheckStep, Report
from rlhf_api.job.groups import Optimizer
from rlhf_planner.device_memory import OFFLOADED_PIECE_BYTES, OFFLOADED_PIECES
from rlhf_workers.training.optimizers.adamw import AdamW, DeviceAdamW, HostAdamW
from rlhf_workers.weights.offload import DeviceOffload

STEPS: Final = 4
RATE: Final = 1e-3
SPARE_BYTES: Final = 16 * 2**20
"""Of the device, beside the pieces: counts of steps, and what the allocator rounds up."""
GIGABYTE: Final = 1e9


@dataclass(frozen=True)
class SteppedSizes:
    """Of what is stepped."""

    rows: int
    columns: int
    """Of the large matrix, which ends within a piece."""
    piece_bytes: int


def run(machine: CheckedMachine, sizes: SteppedSizes, report: Report) -> None:
    """Steps the same parameters both ways, by the same gradients."""
    device, fields = torch.device(machine.device), Optimizer(weight_decay=0.1)
    ours, theirs = (_parameters(sizes, device) for _ in range(2))
    host: AdamW = HostAdamW(ours, fields, DeviceOffload(device), sizes.piece_bytes)
    beside: AdamW = DeviceAdamW(theirs, fields)
    report.figure("host_gb", host.host_bytes / GIGABYTE, "GB")
    for number in range(STEPS):
        for way, adamw, parameters in (("host", host, ours), ("device", beside, theirs)):
            _fill_gradients(parameters, number)
            held = _settled(device)
            if machine.cuda:
                torch.cuda.reset_peak_memory_stats(device)
            started = time.monotonic()
            adamw.step(RATE)
            _settled(device)
            seconds = time.monotonic() - started
            rate = 2 * host.host_bytes / seconds / GIGABYTE if way == "host" else 0.0
            report.row("steps", step=number, moments=way, seconds=seconds, gb_per_second=rate)
            if machine.cuda and way == "host":
                peak = torch.cuda.max_memory_allocated(device) - held
                most = OFFLOADED_PIECES * sizes.piece_bytes + SPARE_BYTES
                report.check(f"two pieces are on the device ({number})", peak <= most, f"{peak / GIGABYTE:.3f} GB")
    wrong = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    report.check("weights are the same bits", not wrong, ", ".join(wrong) or f"{len(ours)} tensors")
    for name in ours:
        kept = beside.moments(name)
        wrong += [moment for moment, value in host.moments(name).items() if not torch.equal(value, kept[moment].cpu())]
    report.check("moments are the same bits", not wrong, ", ".join(wrong) or f"{len(ours)} tensors")


def _parameters(sizes: SteppedSizes, device: torch.device) -> dict[str, torch.Tensor]:
    """Return parameters with a value and room for a gradient, in one order."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = {"matrix": (sizes.rows, sizes.columns), "odd": (37, 29), "norm": (sizes.columns,), "one": (1,)}
    made = {name: torch.randn(shape, generator=generator, device=device) for name, shape in shapes.items()}
    for value in made.values():
        value.requires_grad_()
        value.grad = torch.zeros_like(value)
    return made


def _fill_gradients(parameters: dict[str, torch.Tensor], step: int) -> None:
    for name, value in parameters.items():
        generator = torch.Generator(value.device).manual_seed(step * 100 + len(name))
        assert value.grad is not None
        value.grad.normal_(generator=generator)


def _settled(device: torch.device) -> int:
    """Wait for the device, and return the bytes that tensors have of it; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_allocated(device))


STEP = CheckStep(
    "moments",
    "moments in host memory are stepped to the same bits, two pieces of them on the device at once",
    run,
    small=SteppedSizes(70, 30, 4096),
    gpu=SteppedSizes(32768, 8191, OFFLOADED_PIECE_BYTES),
    limit_seconds=60,
    gpu_gigabytes=10,
)
