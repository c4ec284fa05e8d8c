"""A model's weights to host memory and back: the speed against the bus, the freed memory, the bits."""

from typing import Final

import pytest
import torch
from tests.gpu.models import ONE_BILLION, TINY, random_model
from tests.support.workers.stand_in_memory import StandInMemory

from gpu_check.plugin import CheckedMachine, Figures
from rlhf_workers.weights.offload import MOVES, OffloadableWeights

TURNS: Final = 3
"""Number of turns; the first allocates host memory and pins it."""
LEAST_SHARE: Final = 0.7
"""Share of the bus speed measured by the step `machine`: small tensors cost a launch each."""
FREED_SHARE: Final = 0.95
"""Share of the weights' bytes: memory that shares a block with something that stays is not freed."""
BUSES: Final = {"offload": "pinned_to_host_gb_per_second", "onload": "pinned_to_device_gb_per_second"}


@pytest.mark.gpu(seconds=60, gigabytes=10)
def test_offload(machine: CheckedMachine, figures: Figures) -> None:
    """Weights leave the device at the speed of the bus, free its memory, and come back bit by bit."""
    device = machine.device
    model = random_model(machine.sized(TINY, ONE_BILLION), torch.bfloat16, device)
    size = sum(parameter.nbytes for parameter in model.parameters())
    figures.add("weights_gb", size / 1e9, "GB")
    before = {name: value.detach().to("cpu", copy=True) for name, value in model.named_parameters()}
    weights = OffloadableWeights(model, device, frozen=False, memory=None if machine.cuda else StandInMemory())
    rates: dict[str, float] = {}
    for turn in range(1, TURNS + 1):
        for move in BUSES:
            free = torch.cuda.mem_get_info(device)[0] if machine.cuda else 0
            moved, took = MOVES.totals().get(move, (0, 0.0))
            getattr(weights, move)()
            moved, took = MOVES.totals()[move][0] - moved, MOVES.totals()[move][1] - took
            freed = (torch.cuda.mem_get_info(device)[0] - free) if machine.cuda else 0
            rates[move] = moved / took / 1e9
            cells = {"seconds": took, "gb_per_second": rates[move], "freed_gb": freed / 1e9}
            figures.row("moves", turn=turn, move=move, **cells)
            if machine.cuda and move == "offload":
                free_again = f"the device's memory is free ({turn})"
                figures.check(free_again, freed >= FREED_SHARE * size, f"{freed / 1e9:.3f} GB")
    for move, limit in BUSES.items():
        figures.add(f"{move}_gb_per_second", rates[move], "GB/s")
        if bus := machine.measured("machine", limit):
            share = rates[move] / bus
            figures.check(f"{move} is as fast as the bus", share >= LEAST_SHARE, f"{share:.0%} of {bus:.1f} GB/s")
    other = [name for name, value in model.named_parameters() if not torch.equal(value.detach().cpu(), before[name])]
    figures.check("weights came back bit by bit", not other, ", ".join(other[:3]) or f"{len(before)} tensors")
