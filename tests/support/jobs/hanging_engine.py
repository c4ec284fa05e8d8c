"""An engine that loads slowly and hangs in its third step, as after a deadlock in a kernel."""

import os
import threading
from pathlib import Path
from typing import Any

import torch
from examples.your_engine.plain_engine import PlainEngine

from rlhf_api.job import RLHFJobSpec
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters, StepReport
from rlhf_workers.models.loading import load_causal_lm
from rlhf_workers.progress import stage

GATE = "HANGING_ENGINE_GATE"
"""Variable with the path of a pipe: loading ends when something is written to it."""


class HangingEngine(PlainEngine):
    steps = 0

    def step(self) -> StepReport:
        self.steps += 1
        if self.steps == 3:
            threading.Event().wait()
        return super().step()


def build_engine(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> HangingEngine:
    with stage("compiling for 8 batch sizes"):
        if gate := os.environ.get(GATE):
            Path(gate).read_bytes()
    path = spec.models.actor.path
    model = load_causal_lm(path, field="f", dtype=torch.float32, device=device, attention="eager")
    return HangingEngine(model, tokenizer, SamplingParameters.from_spec(spec), EngineLimits.from_spec(spec))
