"""An engine that is torch's on generation workers of even index and vLLM's on others: a job with workers of both."""

import os
from typing import Any

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_common.names import Env
from rlhf_workers.generation.engine import Engine


def build_engine(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> Engine:
    """Build the one for this worker."""
    if int(os.environ[Env.INDEX]) % 2:
        from rlhf_workers.generation.vllm_engine import build as vllm

        return vllm.build_engine(spec, tokenizer, device)
    from rlhf_workers.generation.torch_engine import build as torch_engine

    return torch_engine.build_engine(spec, tokenizer, device)
