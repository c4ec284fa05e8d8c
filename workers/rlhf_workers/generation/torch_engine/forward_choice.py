"""Chooses how an engine computes decode passes: with the model's own kernels, or with fused kernels.

If fused kernels cannot run a model here, `Auto` uses the model's own and logs why, and `Enabled` is refused.
"""

import logging
import time
from typing import Final, Literal

import numpy as np
import torch

from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import SamplingParameters
from rlhf_workers.generation.torch_engine.buckets import FIRST_CAPACITY, TILE_ROWS
from rlhf_workers.generation.torch_engine.capture import Capture
from rlhf_workers.generation.torch_engine.cpu_ops import CpuOps
from rlhf_workers.generation.torch_engine.decode_ops import DecodeOps, TorchOps
from rlhf_workers.generation.torch_engine.decode_pass import INPUTS
from rlhf_workers.generation.torch_engine.forward import CausalForward
from rlhf_workers.generation.torch_engine.fused_forward import NotFusedError, fused_forward_for
from rlhf_workers.generation.torch_engine.kv_cache import KvPool
from rlhf_workers.generation.torch_engine.kv_pools import DecodePass
from rlhf_workers.generation.torch_engine.static_decoder import SEEN_BEFORE, StaticDecoder, StaticForward

log = logging.getLogger(__name__)

KernelMode = Literal["Auto", "Enabled", "Disabled"]
FIELD: Final = "spec.generation.engineArgs.fusedKernels"
TIMED: Final = 10
"""Timed passes of a trial, after those before the capture."""


def static_forward(
    forward: CausalForward, parameters: SamplingParameters, mode: KernelMode, capture: Capture
) -> StaticForward:
    """Return the way to decode with `forward`'s model; WorkError KernelsUnavailable if `Enabled` is impossible."""
    if mode == "Disabled":
        return forward
    try:
        fused = fused_forward_for(forward, ops_for(forward.device))
    except (NotFusedError, ImportError) as error:
        if mode == "Enabled":
            message = f"{FIELD}: the fused kernels cannot decode with this model here: {error}"
            raise WorkError("KernelsUnavailable", message, field=FIELD, exit_code=ExitCode.USAGE) from error
        log.info("decode passes run the model's own kernels: %s", error)
        return forward
    if mode == "Enabled":
        return fused
    own, merged = (pass_seconds(way, parameters, capture) for way in (forward, fused))
    log.info("a decode pass takes %.2f ms, with fused kernels %.2f ms", 1e3 * own, 1e3 * merged)
    if merged < own:
        return fused
    fused.release()
    return forward


def ops_for(device: torch.device) -> DecodeOps:
    """Return the operations for a device; ImportError if a GPU's kernels are unavailable."""
    if device.type == "cpu":
        return CpuOps()
    if device.type == "cuda" and torch.cuda.is_initialized():
        from rlhf_workers.generation.torch_engine.decode_kernels import TritonOps

        return TritonOps()
    return TorchOps()


@torch.inference_mode()
def pass_seconds(forward: StaticForward, parameters: SamplingParameters, capture: Capture) -> float:
    """Return the seconds of the fastest of TIMED passes over a temporary pool, including sampling and both copies."""
    rows = TILE_ROWS if forward.device.type == "cpu" else 1
    decoder = StaticDecoder(forward, parameters, TILE_ROWS, capture)
    run = DecodePass(KvPool(TILE_ROWS, FIRST_CAPACITY), 0, rows, FIRST_CAPACITY, np.zeros(rows, np.int64))
    inputs = np.zeros((INPUTS, rows), np.int64)
    for _ in range(SEEN_BEFORE + 1):
        decoder.launch(run, inputs).wait()
    times = []
    for _ in range(TIMED):
        started = time.perf_counter()
        decoder.launch(run, inputs).wait()
        times.append(time.perf_counter() - started)
    decoder.drop_graphs()
    return min(times)
