"""The JSON document of measured costs that `rlhf plan --costs` reads.

A figure is {"value": number, "source": "measured" | "learned" | "assumed"}; a profile of layers or of an engine has one
source. The caller provides the figures that the document leaves out.
Owns the check of untrusted values: an error names the field, the value, and what would be right.
Must never guess a figure from another one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.plan_search.cost_figures import (
    CostFigure,
    EngineProfile,
    FigureSource,
    LayerProfile,
    LinkCosts,
    PlanCosts,
)


class CostDocumentError(ValueError):
    """A document that states no valid costs; the message names the field and the value."""


class _CostEntry(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, strict=True, populate_by_name=True)


class _FigureEntry(_CostEntry):
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    source: Annotated[FigureSource, Field(strict=False)]

    @property
    def figure(self) -> CostFigure:
        return CostFigure(self.value, self.source)


class _DurationEntry(_FigureEntry):
    value: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _LinkEntry(_CostEntry):
    bandwidth: _FigureEntry
    latency: _DurationEntry

    @property
    def link(self) -> LinkCosts:
        return LinkCosts(self.bandwidth.figure, self.latency.figure)


class _LayerTime(_CostEntry):
    tokens: Annotated[int, Field(ge=1)]
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _LayerEntry(_CostEntry):
    role: Annotated[str, Field(min_length=1)]
    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    times: Annotated[list[_LayerTime], Field(min_length=1)]
    source: Annotated[FigureSource, Field(strict=False)]

    @property
    def profile(self) -> LayerProfile:
        points = {float(time.tokens): time.seconds for time in self.times}
        return LayerProfile(self.role, self.tensor, tuple(sorted(points.items())), self.source)


class _EngineEntry(_CostEntry):
    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    costs: dict[str, Any]
    source: Annotated[FigureSource, Field(strict=False)]


class CostDocument(_CostEntry):
    """Costs of one kind of device, each figure optional."""

    device: Annotated[str, Field(min_length=1)] | None = None
    """Name of the device."""
    memory_bandwidth: _FigureEntry | None = None
    flops: _FigureEntry | None = None
    layer_seconds: _DurationEntry | None = None
    host_bandwidth: _FigureEntry | None = None
    inside: _LinkEntry | None = None
    """Link between two devices of a node."""
    between: _LinkEntry | None = None
    """Link between two nodes, for each device."""
    devices_per_node: _FigureEntry | None = None
    layers: list[_LayerEntry] = Field(default_factory=list)
    """Times of one layer, forward and backward."""
    engine: _EngineEntry | None = None
    """Costs of a generation worker: `interStage.costs` of a run's journal/job.json."""

    @classmethod
    def read(cls, text: str | bytes) -> CostDocument:
        """Return the document of a JSON text. Raises CostDocumentError for the first invalid field."""
        try:
            return cls.model_validate_json(text, by_alias=True, by_name=False)
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in detail["loc"]) or "the document"
            stated = "" if detail["type"] == "missing" else f" = {str(detail['input'])[:80]!r}"
            unknown = detail["type"] == "extra_forbidden"
            problem = "unknown field; docs/plan-search.md lists the fields" if unknown else detail["msg"]
            raise CostDocumentError(f"{field}{stated}: {problem}") from error

    def applied(self, assumed: PlanCosts) -> PlanCosts:
        """Return the costs of this document, with the figures of `assumed` for those that it leaves out.

        Raises CostDocumentError for engine costs that are no document of `StageCosts`.
        """
        names = ("memory_bandwidth", "flops", "layer_seconds", "host_bandwidth", "devices_per_node")
        update: dict[str, Any] = {name: stated.figure for name in names if (stated := getattr(self, name)) is not None}
        update |= {name: stated.link for name in ("inside", "between") if (stated := getattr(self, name)) is not None}
        update |= {"device_name": self.device} if self.device is not None else {}
        if self.engine is not None:
            update["engine"] = self._engine(self.engine)
        return replace(assumed, **update, layers=tuple(layer.profile for layer in self.layers))

    @staticmethod
    def _engine(engine: _EngineEntry) -> EngineProfile:
        try:
            return EngineProfile(StageCosts.from_document(engine.costs), engine.tensor, engine.source)
        except ValueError as error:
            raise CostDocumentError(
                f"engine.costs: {error}: give interStage.costs of a run's journal/job.json"
            ) from error
