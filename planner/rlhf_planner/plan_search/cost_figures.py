"""The figures of a cost model, each with its source: a device, two links, profiles of layers and of an engine.

Rule: a result is as weak as its weakest figure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rlhf_api.job import RLHFJobSpec
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.roofline import CPU_CORE, HOPPER, Device


class FigureSource(StrEnum):
    """Origin of a figure, from the strongest to the weakest."""

    MEASURED = "measured"
    """A profile of this job's devices."""
    LEARNED = "learned"
    """Observations of earlier iterations."""
    ASSUMED = "assumed"
    """Public hardware figures."""


_STRENGTH: Final = {source: place for place, source in enumerate(FigureSource)}


def weakest(sources: Iterable[FigureSource]) -> FigureSource:
    """Return the weakest of some sources; MEASURED without any."""
    return max(sources, key=_STRENGTH.__getitem__, default=FigureSource.MEASURED)


@dataclass(frozen=True)
class CostFigure:
    """A number with its source."""

    value: float
    source: FigureSource = FigureSource.ASSUMED


NOTHING: Final = CostFigure(0.0, FigureSource.MEASURED)
"""A figure that adds nothing to a prediction and does not weaken it."""


@dataclass(frozen=True)
class LinkCosts:
    """Costs of a link."""

    bandwidth: CostFigure
    """Bytes per second in one direction."""
    latency: CostFigure
    """Seconds of a message without content."""

    @property
    def source(self) -> FigureSource:
        """Source of the link's figures."""
        return weakest((self.bandwidth.source, self.latency.source))


class ModelPart(StrEnum):
    """Part of a model that is profiled on its own."""

    LAYER = "layer"
    """One layer; its tokens are those of a micro-batch, with padding."""
    EMBEDDING = "embedding"
    """The embedding; its tokens are those of a micro-batch, with padding."""
    HEAD = "head"
    """The head and the loss; its tokens are the trained ones."""


@dataclass(frozen=True)
class LayerProfile:
    """Times of one part of a role's model, forward and backward, on one rank of a tensor group."""

    role: str
    tensor: int
    """Ranks of the tensor group."""
    points: tuple[tuple[float, float], ...]
    """(tokens, seconds), rising in tokens."""
    source: FigureSource
    part: ModelPart = ModelPart.LAYER


@dataclass(frozen=True)
class EngineProfile:
    """Costs of a generation worker, from a profile or from a run."""

    costs: StageCosts
    tensor: int
    """Devices of the worker that was profiled."""
    source: FigureSource


@dataclass(frozen=True)
class PlanCosts:
    """Figures of one kind of device and of its links."""

    device_name: str
    memory_bandwidth: CostFigure
    """Bytes per second of device memory."""
    flops: CostFigure
    """Operations per second in matrix products of many tokens."""
    layer_seconds: CostFigure
    """Seconds per layer of a pass, independent of its size."""
    host_bandwidth: CostFigure
    """Bytes per second between device and host memory."""
    inside: LinkCosts
    """Link between two devices of a node."""
    between: LinkCosts
    """Link between two nodes, for each device."""
    devices_per_node: CostFigure
    layers: tuple[LayerProfile, ...] = ()
    engine: EngineProfile | None = None
    compute: CostFigure = CostFigure(1.0)
    """Seconds that training computes, as observed in a run, over those that the roofline predicts; 1 without a run."""
    stage_seconds: CostFigure | None = None
    """Seconds of a micro-batch on a stage, forward and backward, independent of its layers; None: not measured."""
    start_seconds: CostFigure | None = None
    """Seconds by which the first micro-batch of a mini-batch is slower on a stage; None: not measured."""
    optimizer_seconds: CostFigure | None = None
    """Seconds of an optimizer step for each parameter; None: from the memory bandwidth."""
    iteration_seconds: CostFigure | None = None
    """Seconds of an iteration's training outside of its mini-batches' schedules, sums and steps; None: not learned."""

    @property
    def device(self) -> Device:
        """The device for the roofline of `inter_stage`. Its memory is unlimited: the search limits batches itself."""
        return Device(
            self.device_name,
            self.memory_bandwidth.value,
            self.flops.value,
            None,
            self.host_bandwidth.value,
            self.between.bandwidth.value,
            self.layer_seconds.value,
        )

    @property
    def device_source(self) -> FigureSource:
        """Source of the device's figures."""
        return weakest(
            figure.source for figure in (self.memory_bandwidth, self.flops, self.layer_seconds, self.host_bandwidth)
        )

    @property
    def compute_source(self) -> FigureSource:
        """Source of what training computes without a profile of a layer."""
        return self.device_source if self.compute.source is FigureSource.ASSUMED else self.compute.source

    def link(self, span: int) -> LinkCosts:
        """Return the slowest link of ranks that span so many consecutive devices."""
        return self.inside if span <= self.devices_per_node.value else self.between


def assumed_figures(device: Device, inside: float, latencies: tuple[float, float], node: int) -> PlanCosts:
    """Return the figures of public hardware: `inside` is bytes per second in a node, `latencies` seconds (in a node,
    between nodes), `node` devices per node."""
    return PlanCosts(
        device_name=device.name,
        memory_bandwidth=CostFigure(device.memory_bandwidth),
        flops=CostFigure(device.flops),
        layer_seconds=CostFigure(device.layer_seconds),
        host_bandwidth=CostFigure(device.host_bandwidth),
        inside=LinkCosts(CostFigure(inside), CostFigure(latencies[0])),
        between=LinkCosts(CostFigure(device.network_bandwidth), CostFigure(latencies[1])),
        devices_per_node=CostFigure(node),
    )


HOPPER_FIGURES: Final = assumed_figures(HOPPER, 0.8 * 450e9, (10e-6, 20e-6), 8)
"""H100 SXM in nodes of 8: 80% of NVLink 4 in one direction, and the roofline's device and network port."""
CPU_FIGURES: Final = assumed_figures(CPU_CORE, CPU_CORE.host_bandwidth, (50e-6, 100e-6), 64)
"""CPU cores in machines of 64, which exchange data through host memory."""


def device_figures(spec: RLHFJobSpec) -> PlanCosts:
    """Return the assumed figures of the job's kind of device."""
    return HOPPER_FIGURES if spec.generation.gpus_per_replica else CPU_FIGURES
