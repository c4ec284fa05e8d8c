"""The torch engine with a wait before each step, for jobs whose workers import it from the folder of the manifest."""

import time
from typing import Any, Final

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_workers.generation.engine import StepReport
from rlhf_workers.generation.torch_engine import build as torch_engine
from rlhf_workers.generation.torch_engine.engine import TorchEngine

WAIT_SECONDS: Final = 0.02


class WaitingEngine(TorchEngine):
    """A torch engine that waits before each step."""

    def step(self) -> StepReport:
        time.sleep(WAIT_SECONDS)
        return super().step()


def build_engine(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> TorchEngine:
    """Build the engine of a worker."""
    engine = torch_engine.build_engine(spec, tokenizer, device)
    engine.__class__ = WaitingEngine
    return engine
