"""What a panel is: a title, queries, a unit, and words that say what is normal and what to do when it is not.

Owns the form of panels and nothing of Grafana, which `drawing` knows. Rule: no panel without all three sentences of its
description, and none that shows more series than a person reads: queries over workers end in `topk` or a quantile.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final

from rlhf_common.metrics.metric import Metric, Unit
from rlhf_observability.promql import JOB, JOBS, SeriesScope, highest, top

GRID_WIDTH: Final = 24  # columns of Grafana's grid
SIXTH, QUARTER, THIRD, HALF, TWO_THIRDS, WIDE = 4, 6, 8, 12, 16, GRID_WIDTH

GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "#808080"
Thresholds = tuple[tuple[float | None, str], ...]
"""(from which value on, colour), the first from minus infinity, which is None."""

MAX_SERIES: Final = 40  # of one query: more a browser draws slowly and nobody tells apart

BY_JOB: Final = "{{namespace}}/{{rlhf_job}}"
"""How legends name a job, so that runs are compared in one panel."""


class PanelUnit:
    """Units as Grafana names them; `si:` is scaled with the letters k, M and G."""

    SECONDS: Final = "s"
    BYTES: Final = "bytes"
    BYTES_PER_SECOND: Final = "binBps"
    TOKENS: Final = "si:tok"
    TOKENS_PER_SECOND: Final = "si:tok/s"
    SAMPLES: Final = "suffix: samples"
    SHARE: Final = "percentunit"
    NATS: Final = "suffix: nats"
    PER_SECOND: Final = "ops"
    REWARD: Final = "none"
    NUMBER: Final = "short"


class PanelKind(Enum):
    """How a panel is drawn; the value is the type that Grafana knows it by, where it is one of its own."""

    STAT = "stat"
    LINES = "timeseries"
    STACKED = "stacked"
    BARS = "bargauge"
    HEATMAP = "heatmap"
    TABLE = "table"
    STATES = "state-timeline"


@dataclass(frozen=True)
class Query:
    """One query of a panel: PromQL with Grafana's variables in it, and what its series are called."""

    expression: str
    legend: str = ""
    instant: bool = False

    @property
    def asked(self) -> str:
        """The expression as a server is asked it: of jobs, which may be a thousand, those with the largest values."""
        narrow = "{{rlhf_job}}" not in self.legend or self.expression.startswith(("topk", "bottomk"))
        return self.expression if narrow else top(MAX_SERIES, self.expression)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel. Sizes are of Grafana's grid: 24 columns, rows of about 38 pixels."""

    kind: PanelKind
    title: str
    unit: str
    shows: str
    normal: str
    cure: str
    queries: tuple[Query, ...]
    empty: str = ""
    """When it is without data although nothing is wrong, such as "on CPUs"."""
    width: int = HALF
    height: int = 9
    low: float | None = None
    high: float | None = None
    decimals: int | None = None
    thresholds: Thresholds = ()
    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Value -> (text, colour) of values that are words."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Of a table: field of the joined queries -> heading, in order; all others are hidden."""
    column_units: Mapping[str, str] = field(default_factory=dict)
    """Of a table: heading -> unit."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Title -> URL, with Grafana's variables, of what a click on a value offers."""

    @property
    def description(self) -> str:
        """The words that a person on call finds behind the panel's (i)."""
        empty = f"\n\n**Empty** {self.empty}." if self.empty else ""
        return f"{self.shows}\n\n**Normal:** {self.normal.removesuffix('.')}.\n\n**If not:** {self.cure}{empty}"


UNITS: Final = {
    Unit.SECONDS: PanelUnit.SECONDS,
    Unit.BYTES: PanelUnit.BYTES,
    Unit.TOKENS: PanelUnit.TOKENS,
    Unit.TOKENS_PER_SECOND: PanelUnit.TOKENS_PER_SECOND,
    Unit.SAMPLES: PanelUnit.SAMPLES,
    Unit.RATIO: PanelUnit.SHARE,
    Unit.NATS: PanelUnit.NATS,
    Unit.REWARD: PanelUnit.REWARD,
    Unit.NUMBER: PanelUnit.NUMBER,
}
"""The unit of a panel that shows a gauge as it is."""

stat = partial(Panel, kind=PanelKind.STAT, width=QUARTER, height=4)
lines = partial(Panel, kind=PanelKind.LINES)
stacked = partial(Panel, kind=PanelKind.STACKED, low=0)
bars = partial(Panel, kind=PanelKind.BARS, low=0)
heatmap = partial(Panel, kind=PanelKind.HEATMAP)
table = partial(Panel, kind=PanelKind.TABLE, width=WIDE, height=9)
states = partial(Panel, kind=PanelKind.STATES, width=WIDE, height=6)


def per_job(metric: Metric, name: str = "", scope: SeriesScope = JOBS, **labels: str) -> Query:
    """Return a query of a gauge of jobs, a series a job; `name` goes before the job where a panel has several."""
    return Query(highest(scope.value(metric, **labels), *JOB), f"{name} {BY_JOB}".strip())


def per_model(metric: Metric, name: str = "") -> Query:
    """Return a query of a gauge of the models that jobs train, a series a model of a job."""
    return Query(JOBS.latest(metric, "model"), f"{name} {BY_JOB} {{{{model}}}}".strip())


def lines_of(
    metric: Metric,
    title: str,
    cure: str,
    *,
    unit: str = "",
    width: int = THIRD,
    low: float | None = None,
    empty: str = "",
) -> Panel:
    """Return a panel of one gauge as the catalogue describes it, a line a job, or a model of a job."""
    query = per_model(metric) if "model" in metric.label_names else per_job(metric)
    return lines(
        title=title,
        unit=unit or UNITS[metric.unit],
        width=width,
        low=low,
        empty=empty,
        shows=metric.meaning,
        normal=metric.normal,
        cure=cure,
        queries=(query,),
    )


@dataclass(frozen=True)
class Row:
    """A row of panels below a heading that says what it answers."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Annotation:
    """Moments that are marked on all graphs: where the query has a value above zero."""

    name: str
    expression: str
    title: str
    colour: str
    enabled: bool = True
    """False: shown when a person asks for it, as what happens in every iteration is too much for a day."""


class Variable(Enum):
    """What a person chooses above a dashboard, beside the datasource, which all have."""

    CLUSTER = "cluster"
    NAMESPACE = "namespace"
    JOB = "job"
    WORKER = "worker"


@dataclass(frozen=True)
class Dashboard:
    """One dashboard. `uid` is its address for ever: links and bookmarks hold it."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = (Variable.CLUSTER, Variable.NAMESPACE, Variable.JOB)
    annotations: tuple[Annotation, ...] = ()
    since: str = "now-3h"

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, from the top left to the bottom right."""
        return tuple(panel for row in self.rows for panel in row.panels)
