"""Turns on one device in one process: an engine and a training rank, one of them in host memory while the other works.

The device's memory is read before and after every turn: what decodes must be gone when training begins, and the other
way round. The rank takes real optimizer steps between turns, so its moments move too. The engine computes in float32,
in which a made-up model has no ties that another kernel breaks otherwise. Nothing else may use the device meanwhile.
"""

import gc
import time
from dataclasses import dataclass
from typing import Final

import torch

from gpu_check.random_models import ONE_BILLION, TINY, LlamaShape, write_model
from gpu_check.step import CheckedMachine, CheckStep, Report
from gpu_check.steps.kv_migration import FIELD, MigratedSizes, samples_of
from rlhf_api.job.groups import Optimizer
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.models.loading import load_causal_lm, load_tokenizer
from rlhf_workers.training.optimizers.optimizer import StageOptimizer
from rlhf_workers.training.stages.model_stages import ModelStage, build_stage, read_config
from rlhf_workers.training.stages.stage_copy import StageCopy
from rlhf_workers.weights.tensor_file import model_tensors

TURNS: Final = 3
LEFT_SHARE: Final = 0.1
"""Of what a side holds: graphs' library workspaces, the optimizer's step counts and blocks shared with them stay."""
GIGABYTE: Final = 1e9


@dataclass(frozen=True)
class TurnSizes:
    """Of the model, and of what is decoded in a turn."""

    shape: LlamaShape
    samples: int
    prompt: int
    response: int


class TurningRank:
    """One stage of a policy and its optimizer, as a trainer holds them."""

    def __init__(self, stage: ModelStage, device: torch.device) -> None:
        self.stage = stage
        self.optimizer = StageOptimizer(stage, Optimizer())
        self.copy = StageCopy(stage, self.optimizer, device)

    def train(self) -> None:
        """One optimizer step by made-up gradients."""
        self.optimizer.gradients.fill_(1e-3)
        self.optimizer.step(1e-6, 1.0)

    def offload(self) -> None:
        """As a trainer does it."""
        self.optimizer.drop_gradients()
        self.copy.offload()

    def onload(self) -> None:
        """The same."""
        self.copy.onload()
        self.optimizer.make_gradients()


def used(device: torch.device) -> float:
    """Return the bytes of the device that all processes use; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free)


def run(machine: CheckedMachine, sizes: TurnSizes, report: Report) -> None:
    """Builds the rank first and the engine after it, as a colocated worker does, then takes turns."""
    device = torch.device(machine.device)
    folder = machine.scratch / "policy"
    write_model(folder, sizes.shape, torch.float32, device=machine.device, fast=machine.cuda)
    empty = used(device)
    config = read_config(folder, FIELD, 1)
    rank = TurningRank(build_stage(config, model_tensors(folder, FIELD), 1, 0, "lm", device, "sdpa"), device)
    rank.train()
    report.row("turns", turn=0, side="training", seconds=0.0, used_gb=(used(device) - empty) / GIGABYTE)
    rank.offload()
    model = load_causal_lm(str(folder), field=FIELD, dtype=torch.float32, device=device, attention="sdpa")
    limits = EngineLimits(sizes.samples, sizes.prompt, sizes.response)
    sampling = SamplingParameters(temperature=0.0)
    engine = TorchEngine(model, load_tokenizer(str(folder), FIELD), sampling, limits, deterministic=False)
    drawn = [decode(engine, sizes)]
    peaks: dict[str, float] = {"generation": used(device) - empty}
    for turn in range(1, TURNS + 1):
        peaks["training"] = training_turn(engine, rank, device, empty, peaks, turn, report)
        generation_turn(engine, rank, device, empty, peaks, turn, report)
        drawn.append(decode(engine, sizes))
        peaks["generation"] = used(device) - empty
    same = all(tokens == drawn[0] for tokens in drawn)
    report.check("tokens are the same before and after turns", same, f"{len(drawn)} times {sizes.samples} samples")


def training_turn(
    engine: TorchEngine,
    rank: TurningRank,
    device: torch.device,
    empty: float,
    peaks: dict[str, float],
    turn: int,
    report: Report,
) -> float:
    """The engine leaves, the rank comes and trains; the bytes it then uses."""
    started = time.perf_counter()
    engine.sleep()
    left = used(device) - empty
    rank.onload()
    seconds = time.perf_counter() - started
    rank.train()
    held = used(device) - empty
    say(report, turn, "training", seconds, held, left, peaks["generation"], device)
    return held


def generation_turn(
    engine: TorchEngine,
    rank: TurningRank,
    device: torch.device,
    empty: float,
    peaks: dict[str, float],
    turn: int,
    report: Report,
) -> None:
    """The rank leaves, the engine comes."""
    started = time.perf_counter()
    rank.offload()
    left = used(device) - empty
    engine.wake()
    seconds = time.perf_counter() - started
    say(report, turn, "generation", seconds, used(device) - empty, left, peaks["training"], device)


def say(
    report: Report, turn: int, side: str, seconds: float, held: float, left: float, before: float, device: torch.device
) -> None:
    """One turn for the page, and whether the side before has left."""
    cells = {"used_gb": held / GIGABYTE, "left_gb": left / GIGABYTE, "before_gb": before / GIGABYTE}
    report.row("turns", turn=turn, side=side, seconds=seconds, **cells)
    report.figure(f"turn_to_{side}_seconds", seconds, "s")
    if device.type == "cuda":
        found = f"{left / GIGABYTE:.2f} of {before / GIGABYTE:.2f} GB were left"
        report.check(f"the device was free when {side} came ({turn})", left <= LEFT_SHARE * before, found)


def decode(engine: TorchEngine, sizes: TurnSizes) -> dict[int, list[int]]:
    """Tokens of a batch, by sample."""
    plan = MigratedSizes(sizes.shape, sizes.samples, sizes.prompt, sizes.response, 0)
    engine.submit(samples_of(plan))
    tokens: dict[int, list[int]] = {}
    while engine.held:
        tokens |= {response.key.sample: response.tokens.tolist() for response in engine.step().finished}
    gc.collect()  # responses may hold on to nothing of the device, and this shows it
    return tokens


STEP = CheckStep(
    "colocated",
    "an engine and a training rank take turns on one device: memory before and after each turn, and the same tokens",
    run,
    small=TurnSizes(TINY, samples=4, prompt=16, response=24),
    gpu=TurnSizes(ONE_BILLION, samples=16, prompt=256, response=64),
    limit_seconds=80,
    small_limit_seconds=120,
    gpu_gigabytes=40,
)
