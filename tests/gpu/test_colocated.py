"""Turns on one device in one process: an engine and a training rank, one of them in host memory while the other works.

The device's memory is read before and after every turn: the engine's memory must be free when training begins, and vice
versa. The rank takes real optimizer steps between turns, so its moments move too. The engine computes in float32, in
which a generated model has no ties that another kernel breaks differently. No other process may use the device
meanwhile.
"""

import gc
import time
from collections.abc import Callable
from typing import Final

import pytest
import torch
from tests.gpu.decoding import decoded, engine_of, load_written, requests
from tests.gpu.models import ONE_BILLION, TINY, write_model
from tests.gpu.timing import wait_for

from gpu_check.plugin import CheckedMachine, Figures
from rlhf_api.job.groups import Optimizer
from rlhf_workers.training.optimizers.optimizer import StageOptimizer
from rlhf_workers.training.stages.model_stages import ModelStage, build_stage, read_config
from rlhf_workers.training.stages.stage_copy import StageCopy
from rlhf_workers.weights.tensor_file import model_tensors

TURNS: Final = 3
LEFT_SHARE: Final = 0.1
"""Share of a side's memory that may stay: graphs' library workspaces, step counts, and blocks shared with them."""
GIGABYTE: Final = 1e9


class TurningRank:
    """One stage of a policy and its optimizer, as in a trainer."""

    def __init__(self, stage: ModelStage, device: torch.device) -> None:
        self.stage = stage
        self.optimizer = StageOptimizer(stage, Optimizer())
        self.copy = StageCopy(stage, self.optimizer, device)

    def train(self) -> None:
        """Take one optimizer step with invented gradients."""
        self.optimizer.gradients.fill_(1e-3)
        self.optimizer.step(1e-6, 1.0)

    def offload(self) -> None:
        """Leave the device, as a trainer does."""
        self.optimizer.drop_gradients()
        self.copy.offload()

    def onload(self) -> None:
        """Return to the device, as a trainer does."""
        self.copy.onload()
        self.optimizer.make_gradients()


@pytest.mark.gpu(seconds=80, gigabytes=40)
def test_colocated(machine: CheckedMachine, figures: Figures) -> None:
    """An engine and a training rank take turns on one device: memory before and after each turn, and same tokens."""
    device, config = machine.device, machine.sized(TINY, ONE_BILLION)
    count, prompt, response = machine.sized((4, 16, 24), (16, 256, 64))
    folder = machine.scratch / "policy"
    write_model(folder, config, torch.float32, device)
    empty = used(device)
    stages = read_config(folder, "model", 1)
    rank = TurningRank(build_stage(stages, model_tensors(folder, "model"), 1, 0, "lm", device, "sdpa"), device)
    rank.train()
    figures.row("turns", turn=0, side="training", seconds=0.0, used_gb=(used(device) - empty) / GIGABYTE)
    rank.offload()  # the engine comes second, as in a worker of both
    engine = engine_of(load_written(folder, torch.float32, device), count, prompt, response, greedy=True)

    def decode() -> dict[int, list[int]]:
        tokens = decoded(engine, requests(count, prompt, response, config.vocab_size))
        gc.collect()  # responses must not refer to device memory, and this shows it
        return tokens

    def turn(
        number: int, side: str, leaves: Callable[[], None], comes: Callable[[], None], works: Callable[[], None]
    ) -> None:
        other = "generation" if side == "training" else "training"
        started = time.perf_counter()
        leaves()
        left = used(device) - empty
        comes()
        seconds = time.perf_counter() - started
        works()
        taken, before = used(device) - empty, peaks[other]
        cells = {"used_gb": taken / GIGABYTE, "left_gb": left / GIGABYTE, "before_gb": before / GIGABYTE}
        figures.row("turns", turn=number, side=side, seconds=seconds, **cells)
        figures.add(f"turn_to_{side}_seconds", seconds, "s")
        if machine.cuda:
            found = f"{left / GIGABYTE:.2f} of {before / GIGABYTE:.2f} GB were left"
            figures.check(f"the device was free when {side} came ({number})", left <= LEFT_SHARE * before, found)
        peaks[side] = taken

    drawn, peaks = [decode()], {"generation": used(device) - empty}
    for number in range(1, TURNS + 1):
        turn(number, "training", engine.sleep, rank.onload, rank.train)
        turn(number, "generation", rank.offload, engine.wake, lambda: None)
        drawn.append(decode())
        peaks["generation"] = used(device) - empty
    same = all(tokens == drawn[0] for tokens in drawn)
    figures.check("tokens are the same before and after turns", same, f"{len(drawn)} times {count} samples")


def used(device: torch.device) -> float:
    """Return the bytes of the device that all processes use; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    wait_for(device)
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free)
