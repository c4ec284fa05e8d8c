"""An engine for a job with both kinds of workers: torch on generation workers of even index, vLLM on the others.

Rule: no worker decodes before the engines of both exist. A slow start of one therefore leaves samples for it. The
engines meet in the folder of the variable MEETING.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_common.names import Env
from rlhf_workers.generation.engine import Engine

MEETING = "MIXED_ENGINES_FOLDER"
"""Variable with a folder in which each worker leaves a file when its engine is built."""
TIMEOUT_SECONDS = 1200.0


def build_engine(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> Engine:
    """Build the engine of this worker, and wait for that of the other one."""
    index = int(os.environ[Env.INDEX])
    if index % 2:
        from rlhf_workers.generation.vllm_engine import build as vllm

        engine: Engine = vllm.build_engine(spec, tokenizer, device)
    else:
        from rlhf_workers.generation.torch_engine import build as torch_engine

        engine = torch_engine.build_engine(spec, tokenizer, device)
    _meet(Path(os.environ[MEETING]), index, spec.generation.replicas)
    return engine


def _meet(folder: Path, index: int, workers: int) -> None:
    (folder / f"engine-{index}").touch()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not all((folder / f"engine-{other}").exists() for other in range(workers)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the engines of all {workers} workers were not built within {TIMEOUT_SECONDS:g} s")
        time.sleep(0.05)
