"""A model's weights to host memory and back: the speed against the bus, the memory that is really free, the bits."""

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import LlamaForCausalLM

from gpu_check.random_models import ONE_BILLION, TINY, LlamaShape, config_of
from gpu_check.step import CheckedMachine, CheckStep, Report
from rlhf_workers.devices.copy_stream import CopyStream, HostCopyStream
from rlhf_workers.weights.offload import MOVES, OffloadableWeights, OffloadMemory

TURNS: Final = 3
"""The first takes host memory and pins it."""
LEAST_SHARE: Final = 0.7
"""Of what the step `machine` measured of the bus: small tensors cost a launch each."""
FREED_SHARE: Final = 0.95
"""Of the weights' bytes: what shares a block with something that stays is not freed."""


@dataclass(frozen=True)
class OffloadedSizes:
    """Of the model that moves."""

    shape: LlamaShape


class HostAlone:
    """An `OffloadMemory` where both sides are host memory: the same order of copies on a machine without a GPU."""

    def host(self, size: int) -> torch.Tensor:
        """Return memory."""
        return torch.empty(size, dtype=torch.uint8)

    def on_device(self, like: torch.Tensor) -> torch.Tensor:
        """Return other memory."""
        return torch.empty_like(like)

    def copies(self) -> CopyStream:
        """Return what copies at once."""
        return HostCopyStream()

    def free(self) -> int:
        """Nothing is counted."""
        return 0


def run(machine: CheckedMachine, sizes: OffloadedSizes, report: Report) -> None:
    """Moves it out and back a few times."""
    device = torch.device(machine.device)
    torch.manual_seed(0)
    with device:
        model: Any = LlamaForCausalLM._from_config(config_of(sizes.shape), dtype=torch.bfloat16)
    size = sum(parameter.nbytes for parameter in model.parameters())
    report.figure("weights_gb", size / 1e9, "GB")
    before = {name: value.detach().cpu() for name, value in model.named_parameters()}
    memory: OffloadMemory | None = None if machine.cuda else HostAlone()
    weights = OffloadableWeights(model, device, frozen=False, memory=memory)
    rates: dict[str, float] = {}
    for turn in range(1, TURNS + 1):
        for move in ("offload", "onload"):
            free = torch.cuda.mem_get_info(device)[0] if machine.cuda else 0
            moved, took = MOVES.totals().get(move, (0, 0.0))
            getattr(weights, move)()
            bytes_now, seconds_now = MOVES.totals()[move]
            freed = (torch.cuda.mem_get_info(device)[0] - free) if machine.cuda else 0
            rates[move] = (bytes_now - moved) / (seconds_now - took) / 1e9
            report.row(
                "moves",
                turn=turn,
                move=move,
                seconds=seconds_now - took,
                gb_per_second=rates[move],
                freed_gb=freed / 1e9,
            )
            if machine.cuda and move == "offload":
                report.check(
                    f"the device's memory is free ({turn})", freed >= FREED_SHARE * size, f"{freed / 1e9:.3f} GB"
                )
    for move, limit in (("offload", "pinned_to_host_gb_per_second"), ("onload", "pinned_to_device_gb_per_second")):
        report.figure(f"{move}_gb_per_second", rates[move], "GB/s")
        bus = machine.measured("machine", limit)
        if bus:
            share = rates[move] / bus
            report.check(f"{move} is as fast as the bus", share >= LEAST_SHARE, f"{share:.0%} of {bus:.1f} GB/s")
    other = [name for name, value in model.named_parameters() if not torch.equal(value.detach().cpu(), before[name])]
    report.check("weights came back bit by bit", not other, ", ".join(other[:3]) or f"{len(before)} tensors")


STEP = CheckStep(
    "offload",
    "weights leave the device at the speed of the bus, free its memory, and come back bit by bit",
    run,
    small=OffloadedSizes(TINY),
    gpu=OffloadedSizes(ONE_BILLION),
    limit_seconds=60,
    gpu_gigabytes=10,
)
