"""The JSON document of measured costs that `rlhf plan --costs` reads.

A figure is {"value": number, "source": "measured" | "learned" | "assumed"}. Owns the check of untrusted values. Must
never guess a figure from another one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.plan_search.cost_figures import (
    CostFigure,
    EngineProfile,
    FigureSource,
    LayerProfile,
    LinkCosts,
    ModelPart,
    PlanCosts,
)

COSTS_FILE: Final = "costs.json"
"""Name of the document in a run folder."""
RATES: Final = ("memory_bandwidth", "flops", "host_bandwidth", "devices_per_node")
"""Figures for which a larger value is faster."""
FIGURES: Final = (*RATES, "layer_seconds", "stage_seconds", "start_seconds", "optimizer_seconds")
"""Single figures of a document and of PlanCosts."""
LINKS: Final = ("inside", "between")


class CostDocumentError(ValueError):
    """An invalid document of costs; the message names the field."""


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
    part: Annotated[ModelPart, Field(strict=False)] = ModelPart.LAYER
    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    times: Annotated[list[_LayerTime], Field(min_length=1)]
    source: Annotated[FigureSource, Field(strict=False)]

    @property
    def profile(self) -> LayerProfile:
        points = {float(time.tokens): time.seconds for time in self.times}
        return LayerProfile(self.role, self.tensor, tuple(sorted(points.items())), self.source, self.part)

    def merged(self, other: _LayerEntry) -> _LayerEntry:
        """Return the entry with the shorter time for each number of tokens."""
        points = dict(other.profile.points)
        for tokens, seconds in self.profile.points:
            points[tokens] = min(seconds, points.get(tokens, seconds))
        times = [_LayerTime(tokens=int(tokens), seconds=seconds) for tokens, seconds in sorted(points.items())]
        return self.model_copy(update={"times": times})


class _EngineEntry(_CostEntry):
    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    costs: dict[str, Any]
    source: Annotated[FigureSource, Field(strict=False)]


def _faster(first: _FigureEntry | None, second: _FigureEntry | None, name: str) -> _FigureEntry | None:
    stated = [figure for figure in (first, second) if figure is not None]
    choose = max if name in RATES else min
    return choose(stated, key=lambda figure: figure.value) if stated else None


class CostDocument(_CostEntry):
    """Costs of one kind of device, each figure optional."""

    device: Annotated[str, Field(min_length=1)] | None = None
    """Name of the device."""
    memory_bandwidth: _FigureEntry | None = None
    flops: _FigureEntry | None = None
    layer_seconds: _DurationEntry | None = None
    stage_seconds: _DurationEntry | None = None
    """Seconds of a micro-batch on a stage, independent of its layers."""
    start_seconds: _DurationEntry | None = None
    """Seconds by which the first micro-batch of a mini-batch is slower on a stage."""
    optimizer_seconds: _FigureEntry | None = None
    """Seconds of an optimizer step for each parameter."""
    host_bandwidth: _FigureEntry | None = None
    inside: _LinkEntry | None = None
    """Link between two devices of a node."""
    between: _LinkEntry | None = None
    """Link between two nodes, for each device."""
    devices_per_node: _FigureEntry | None = None
    layers: list[_LayerEntry] = Field(default_factory=list)
    """Times of one layer, of the embedding, or of the head with the loss, forward and backward."""
    engine: _EngineEntry | None = None
    """Costs of a generation worker: `interStage.costs` of a run's journal/job.json."""

    @classmethod
    def read(cls, text: str | bytes) -> CostDocument:
        """Return the document of a JSON text. Raises CostDocumentError for invalid JSON, or for the first invalid
        field.
        """
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
        update: dict[str, Any] = {
            name: stated.figure for name in FIGURES if (stated := getattr(self, name)) is not None
        }
        update |= {name: stated.link for name in LINKS if (stated := getattr(self, name)) is not None}
        update |= {"device_name": self.device} if self.device is not None else {}
        if self.engine is not None:
            update["engine"] = self._engine(self.engine)
        stated = tuple(layer.profile for layer in self.layers)
        replaced = {(profile.role, profile.part, profile.tensor) for profile in stated}
        others = [own for own in assumed.layers if (own.role, own.part, own.tensor) not in replaced]
        return replace(assumed, **update, layers=(*others, *stated))

    def merged(self, other: CostDocument) -> CostDocument:
        """Return the figures of two ranks of one group. Where both measured, the faster one counts.

        Links and the device are those of this document if it has them. An engine of `other` is left out.
        """
        update: dict[str, Any] = {}
        for name in (*FIGURES, *LINKS):
            own, theirs = getattr(self, name), getattr(other, name)
            update[name] = _faster(own, theirs, name) if name in FIGURES else own or theirs
        layers: dict[tuple[str, str, int], _LayerEntry] = {}
        for layer in (*self.layers, *other.layers):
            key = layer.role, layer.part, layer.tensor
            layers[key] = layers[key].merged(layer) if key in layers else layer
        return self.model_copy(update=update | {"layers": list(layers.values()), "device": self.device or other.device})

    def text(self) -> str:
        """Return the document as JSON, without the fields that are None."""
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=1)

    @staticmethod
    def _engine(engine: _EngineEntry) -> EngineProfile:
        try:
            return EngineProfile(StageCosts.from_document(engine.costs), engine.tensor, engine.source)
        except ValueError as error:
            raise CostDocumentError(
                f"engine.costs: {error}: give interStage.costs of a run's journal/job.json"
            ) from error
