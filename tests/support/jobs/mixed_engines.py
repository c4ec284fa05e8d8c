"""An engine for a job with both kinds of workers: torch on generation workers of even index, vLLM on the others."""

import os
from typing import Any

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_common.names import Env
from rlhf_workers.generation.engine import Engine


def build_engine(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> Engine:
    """Build the engine of this worker."""
    if int(os.environ[Env.INDEX]) % 2:
        from rlhf_workers.generation.vllm_engine import build as vllm

        return vllm.build_engine(spec, tokenizer, device)
    from rlhf_workers.generation.torch_engine import build as torch_engine

    return torch_engine.build_engine(spec, tokenizer, device)
