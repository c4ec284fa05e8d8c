"""A dashboard as the document that Grafana imports: its panels in place, variables, links and annotations.

Rule: the same code gives the same bytes, so that a test can detect an outdated file. The datasource is a variable, so a
document does not depend on where it is imported.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Final

from grafana_foundation_sdk.builders import dashboard as sdk
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from rlhf_observability.dashboards.annotations import annotation_json, annotations
from rlhf_observability.dashboards.drawing import draw
from rlhf_observability.dashboards.panels import GRID_WIDTH, Dashboard, Panel, Row
from rlhf_observability.dashboards.variables import variables

TAG: Final = "rlhf"
"""Tag of all dashboards, by which the links above each select them."""
REFRESH: Final = "30s"
"""Refresh interval of a dashboard."""


def document(dashboard: Dashboard) -> str:
    """Return a dashboard as JSON text with a final newline."""
    built = json.loads(JSONEncoder(sort_keys=True).encode(_build(dashboard).build()))
    for variable in built["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min"):
            variable.pop(name, None)  # for intervals; the library writes it for all
    for panel in built["panels"]:
        panel.get("options", {}).pop("footer", None)  # for tables; no panel uses it
        for name in ("transparent", "repeatDirection"):
            panel.pop(name, None)  # defaults of Grafana; no panel is transparent or repeated
        for target in panel.get("targets", ()):
            if not target.get("instant"):
                target.pop("instant", None)  # the default of Grafana
    built["annotations"] = {"list": [annotation_json(each) for each in annotations(dashboard)]}
    return json.dumps(built, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _build(dashboard: Dashboard) -> sdk.Dashboard:
    link = sdk.DashboardLink("Dashboards of rlhf-operator").type(models.DashboardLinkType.DASHBOARDS).icon("dashboard")
    built = (
        sdk.Dashboard(dashboard.title)
        .uid(dashboard.uid)
        .description(dashboard.description)
        .tags([TAG])
        .time(dashboard.since, "now")
        .refresh(REFRESH)
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .variables(list(variables(dashboard.variables)))
        .links([link.tags([TAG]).as_dropdown(True).include_vars(True).keep_time(True)])
    )
    number, top = 1, 0
    for row in dashboard.rows:
        built.with_row(sdk.Row(row.title).id(number).grid_pos(models.GridPos(h=1, w=GRID_WIDTH, x=0, y=top)))
        number, top = number + 1, top + 1
        for panel, place in places(row, top):
            built.with_panel(draw(panel, number, place))
            number, bottom = number + 1, place.y + place.h
        top = bottom
    return built


def places(row: Row, top: int) -> Iterator[tuple[Panel, models.GridPos]]:
    """Yield the panels of a row with their places: from left to right, in a new line when the grid is full.

    Raises ValueError if panels of one line differ in height, or a line does not end at the edge of the grid.
    """
    left, height = 0, 0
    for panel, width in _widths(row):
        if left and panel.height != height:
            raise ValueError(f"panel {panel.title!r} is {panel.height} high beside one of {height}")
        if left + width > GRID_WIDTH:
            raise ValueError(f"panel {panel.title!r} ends at column {left + width} of {GRID_WIDTH}")
        yield panel, models.GridPos(h=panel.height, w=width, x=left, y=top)
        left, height = left + width, panel.height
        if left == GRID_WIDTH:
            left, top = 0, top + height
    if left:
        raise ValueError(f"the last line of row {row.title!r} ends at column {left} of {GRID_WIDTH}")


def _widths(row: Row) -> Iterator[tuple[Panel, int]]:
    """Yield the panels of a row with their widths."""
    for _, neighbours in groupby(row.panels, key=lambda panel: (panel.width, panel.height)):
        panels = list(neighbours)
        share = GRID_WIDTH // min(len(panels), row.columns)
        yield from ((panel, panel.width or share) for panel in panels)
