"""The torch engine at two paces: generation workers of odd index take longer for each step."""

import os
import time
from typing import Any, Final

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_common.names import Env
from rlhf_workers.generation.engine import StepReport
from rlhf_workers.generation.torch_engine import build as torch_engine
from rlhf_workers.generation.torch_engine.engine import TorchEngine

SLOWER_SECONDS: Final = 0.02
"""Seconds that a step of a slow worker takes longer."""


class SlowEngine(TorchEngine):
    """A torch engine that waits before each step."""

    def step(self) -> StepReport:
        time.sleep(SLOWER_SECONDS)
        return super().step()


def build_engine(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> TorchEngine:
    """Build the engine of this worker."""
    engine = torch_engine.build_engine(spec, tokenizer, device)
    if int(os.environ[Env.INDEX]) % 2:
        engine.__class__ = SlowEngine
    return engine
