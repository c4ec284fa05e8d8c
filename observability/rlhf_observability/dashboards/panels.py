"""Definitions of panels, rows and dashboards. `drawing` gives panels Grafana's form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final

from rlhf_common.metrics.metric import Metric, Unit
from rlhf_observability.promql import JOB, JOBS, SeriesScope, highest, top

GRID_WIDTH: Final = 24  # columns of Grafana's grid
HALF: Final = 12

GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "#808080"
Thresholds = tuple[tuple[float | None, str], ...]
"""(lower bound, colour); the first bound is None, minus infinity."""

MAX_SERIES: Final = 40  # per query: people cannot distinguish more

BY_JOB: Final = "{{namespace}}/{{rlhf_job}}"
"""Name of a job in legends, so that one panel compares runs."""


class PanelUnit:
    """Units by Grafana's names; `si:` scales with the letters k, M and G."""

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
    """Ways to draw a panel; the value is Grafana's own type, if there is one."""

    STAT = "stat"
    LINES = "timeseries"
    STACKED = "stacked"
    BARS = "bargauge"
    HEATMAP = "heatmap"
    TABLE = "table"
    STATES = "state-timeline"


@dataclass(frozen=True)
class Query:
    """One query of a panel: PromQL with Grafana's variables, and the name of its series."""

    expression: str
    legend: str = ""
    instant: bool = False

    @property
    def asked(self) -> str:
        """The expression sent to a server: with the job in the legend, the MAX_SERIES largest series at most.

        An expression that starts with topk or bottomk is unchanged.
        """
        narrow = "{{rlhf_job}}" not in self.legend or self.expression.startswith(("topk", "bottomk"))
        return self.expression if narrow else top(MAX_SERIES, self.expression)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel. Sizes are in Grafana's grid of GRID_WIDTH columns."""

    kind: PanelKind
    title: str
    unit: str
    shows: str
    normal: str
    cure: str
    queries: tuple[Query, ...]
    empty: str = ""
    """Text after "Empty": when it has no data although there is no problem, such as "for jobs without a critic"."""
    width: int = 0
    """Columns; 0: an equal share of a line with its neighbours of the same height that have no width either."""
    height: int = 9
    low: float | None = None
    high: float | None = None
    decimals: int | None = None
    thresholds: Thresholds = ()
    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Value -> (text, colour) for values that are words."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """For a table: field of the joined queries -> heading, in order; all others are hidden."""
    column_units: Mapping[str, str] = field(default_factory=dict)
    """For a table: heading -> unit."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Title -> URL of the links on a value, in a table on those of the first column, with Grafana's variables."""

    @property
    def description(self) -> str:
        """The text behind the panel's (i), for a person on call."""
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
"""Unit of the catalogue -> unit of a panel for an unscaled gauge."""

stat = partial(Panel, kind=PanelKind.STAT, height=4)
lines = partial(Panel, kind=PanelKind.LINES, low=0)
stacked = partial(Panel, kind=PanelKind.STACKED, low=0)
bars = partial(Panel, kind=PanelKind.BARS, low=0)
heatmap = partial(Panel, kind=PanelKind.HEATMAP)
table = partial(Panel, kind=PanelKind.TABLE, width=GRID_WIDTH)
states = partial(Panel, kind=PanelKind.STATES, height=6)


def per_job(metric: Metric, name: str = "", scope: SeriesScope = JOBS, **labels: str) -> Query:
    """Return a query of a gauge of jobs, one series per job; `name` precedes the job in the legend."""
    return Query(highest(scope.value(metric, **labels), *JOB), f"{name} {BY_JOB}".strip())


def per_model(metric: Metric, name: str = "") -> Query:
    """Return a query of a gauge of trained models, one series per model of a job."""
    return Query(JOBS.latest(metric, "model"), f"{name} {BY_JOB} {{{{model}}}}".strip())


def lines_of(
    metric: Metric,
    title: str,
    cure: str,
    *,
    unit: str = "",
    low: float | None = 0,
    empty: str = "",
) -> Panel:
    """Return a panel of one gauge from the catalogue, one line per job, or per model of a job."""
    query = per_model(metric) if "model" in metric.label_names else per_job(metric)
    return lines(
        title=title,
        unit=unit or UNITS[metric.unit],
        low=low,
        empty=empty,
        shows=metric.meaning,
        normal=metric.normal,
        cure=cure,
        queries=(query,),
    )


@dataclass(frozen=True)
class Row:
    """A row of panels below a heading with its question."""

    title: str
    panels: tuple[Panel, ...]
    columns: int = 6
    """Maximum number of panels without a width in one line."""


@dataclass(frozen=True)
class Annotation:
    """Marked moments on all graphs, where the query has a value above zero."""

    name: str
    expression: str
    title: str
    colour: str
    enabled: bool = True
    """False: shown on request only."""


class Variable(Enum):
    """Choices above a dashboard, besides the datasource, which all have."""

    CLUSTER = "cluster"
    NAMESPACE = "namespace"
    JOB = "job"
    WORKER = "worker"


@dataclass(frozen=True)
class Dashboard:
    """One dashboard. `uid` is its permanent address, used in links and bookmarks."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = (Variable.CLUSTER, Variable.NAMESPACE, Variable.JOB)
    annotations: tuple[Annotation, ...] = ()
    since: str = "now-3h"

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, row by row."""
        return tuple(panel for row in self.rows for panel in row.panels)
