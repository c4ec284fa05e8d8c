"""Estimates costs before any measurement, from a roofline of public hardware figures.

Peak figures are those of the H100 SXM datasheet: 3.35 TB/s HBM3, 989 Tflop/s dense bfloat16, 80 GB, 64 GB/s PCIe 5 in
one direction, and one 400 Gb/s network port for each GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rlhf_planner.inter_stage.costs import SCORE_BATCH, StageCosts
from rlhf_planner.inter_stage.fitted_costs import DecodeLines, PassFormula

TOKEN_FLOPS: Final = 2.0
"""Operations per parameter and token of a forward pass: one multiplication, one addition."""
ROOM_SHARE: Final = 0.9
"""Share of the device memory left by weights that KV caches may use."""


@dataclass(frozen=True)
class Device:
    """One device of a worker, with the rates that engines are assumed to reach on it."""

    name: str
    memory_bandwidth: float
    """Bytes per second that decoding reaches."""
    flops: float
    """Operations per second that a forward pass over many tokens reaches."""
    memory_bytes: float | None
    """Bytes of memory; None means unlimited."""
    host_bandwidth: float
    """Bytes per second from host memory."""
    network_bandwidth: float
    """Bytes per second to another worker."""
    layer_seconds: float
    """Seconds per layer of a pass, independent of its size: kernels, and collectives between a worker's devices."""


HOPPER: Final = Device("H100 SXM", 0.7 * 3.35e12, 0.5 * 989e12, 80e9, 0.8 * 64e9, 0.8 * 50e9, 20e-6)
"""An H100 at 70% of the memory bandwidth, half of the dense bfloat16 peak, 80% of a link."""
CPU_CORE: Final = Device("CPU core", 8e9, 20e9, None, 4e9, 1e9, 100e-6)
"""One core of a server with float32: its rounded share of memory channels and vector units."""


@dataclass(frozen=True)
class ModelShape:
    """Size of a model."""

    parameters: float
    layers: int
    kv_bytes_per_token: float
    value_bytes: int = 2

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.value_bytes


def assumed_costs(
    actor: ModelShape,
    scorers: Sequence[ModelShape],
    device: Device,
    devices: int,
    max_batch_size: int,
    *,
    replays: bool = False,
    score_batch: int = SCORE_BATCH,
) -> StageCosts:
    """Return the costs of a worker with `devices` devices that decodes with `actor` and scores with all of
    `scorers`."""
    read, compute = device.memory_bandwidth * devices, device.flops * devices
    batches = sorted({1, max_batch_size, *(1 << power for power in range(max_batch_size.bit_length()))})
    fixed, weights = actor.layers * device.layer_seconds, actor.weight_bytes / read
    base = [max(weights, TOKEN_FLOPS * actor.parameters * batch / compute) + fixed for batch in batches]
    slope = [batch * actor.kv_bytes_per_token / read for batch in batches]
    parameters = sum(model.parameters for model in scorers)
    layers = sum(model.layers for model in scorers)
    offloaded = sum(model.weight_bytes for model in scorers)
    room = None
    if device.memory_bytes is not None:
        room = ROOM_SHARE * max(0.0, device.memory_bytes * devices - actor.weight_bytes)
    return StageCosts(
        decode=DecodeLines(tuple(batches), tuple(base), tuple(slope)),
        max_batch_size=max_batch_size,
        prefill=PassFormula(weights + fixed, 0.0, TOKEN_FLOPS * actor.parameters / compute),
        score=PassFormula(offloaded / read + layers * device.layer_seconds, 0.0, TOKEN_FLOPS * parameters / compute),
        score_batch=score_batch,
        wake_seconds=offloaded / (device.host_bandwidth * devices),
        kv_bytes_per_token=actor.kv_bytes_per_token,
        kv_room_bytes=room,
        bandwidth=device.network_bandwidth * devices,
        replays=replays,
        padded=False,
    )
