"""Panels in Grafana's form: defines how each kind is drawn.

Rule: one function draws all panels of a kind.
"""

from collections.abc import Callable, Mapping
from typing import Final

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as enums
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_enums
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from rlhf_observability.dashboards.panels import GREEN, Panel, PanelKind, PanelUnit, Query
from rlhf_observability.dashboards.variables import DATASOURCE

SdkPanel = stat.Panel | timeseries.Panel | bargauge.Panel | heatmap.Panel | table.Panel | statetimeline.Panel
LAST: Final = "lastNotNull"
BAR_PIXELS: Final = 32  # height of one bar, so that two bars do not get huge text


def draw(panel: Panel, number: int, place: models.GridPos) -> SdkPanel:
    """Return a panel at its place, with its number for links to a single panel."""
    drawn = _KINDS[panel.kind](panel)
    drawn.id(number).title(panel.title).description(panel.description).datasource(DATASOURCE).grid_pos(place)
    for index, query in enumerate(panel.queries):
        drawn.with_target(_target(panel.kind, query, chr(ord("A") + index)))
    _scale(drawn, panel)
    return drawn


def _scale(drawn: SdkPanel, panel: Panel) -> None:
    """Set a panel's unit, bounds, decimals, colours and texts, and its links unless it is a table."""
    drawn.unit(panel.unit)
    if panel.low is not None:
        drawn.min(panel.low)
    if panel.high is not None:
        drawn.max(panel.high)
    if panel.decimals is not None:
        drawn.decimals(panel.decimals)
    steps = panel.thresholds or ((None, GREEN),)
    absolute = dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE)
    drawn.thresholds(absolute.steps([models.Threshold(value=value, color=colour) for value, colour in steps]))
    if panel.texts:
        words = {
            value: models.ValueMappingResult(text=text, color=colour, index=index)
            for index, (value, (text, colour)) in enumerate(panel.texts.items())
        }
        drawn.mappings([models.ValueMap(options=words)])
    if panel.links and panel.kind is not PanelKind.TABLE:
        drawn.data_links([_link(title, url) for title, url in panel.links.items()])


def _link(title: str, url: str) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(title).url(url)


def _target(kind: PanelKind, query: Query, letter: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(letter).expr(query.asked)  # a query without a data source uses the panel's
    if query.legend:
        target.legend_format(query.legend)
    if "_bucket{" in query.expression:
        target.exemplar(True)  # shows iteration, worker or sample of single values, if Prometheus stores exemplars
    if kind is PanelKind.TABLE:
        return target.instant().format(PromQueryFormat.TABLE)
    if kind is PanelKind.HEATMAP:
        return target.range().format(PromQueryFormat.HEATMAP).legend_format("{{le}}")
    return target.instant() if query.instant else target.range()


# ---------------------------------------------------------------- kinds


def _reduced(*, every_row: bool = False) -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs([LAST]).fields("").values(every_row)


def _stat(panel: Panel) -> SdkPanel:
    mode = enums.BigValueColorMode.BACKGROUND_SOLID if panel.thresholds else enums.BigValueColorMode.NONE
    sparkline = enums.BigValueGraphMode.NONE if panel.queries[0].instant else enums.BigValueGraphMode.AREA
    several = len(panel.queries) > 1 or bool(panel.queries[0].legend)
    text = enums.BigValueTextMode.VALUE_AND_NAME if several else enums.BigValueTextMode.VALUE
    colour = models.FieldColorModeId.THRESHOLDS
    return (
        stat.Panel()
        .reduce_options(_reduced())
        .color_mode(mode)
        .graph_mode(sparkline)
        .text_mode(text)
        .justify_mode(enums.BigValueJustifyMode.AUTO)
        .orientation(enums.VizOrientation.AUTO)
        .color_scheme(dashboard.FieldColor().mode(colour))
        .no_value("none")
    )


def _lines(panel: Panel) -> SdkPanel:
    drawn = _graph(panel)
    if panel.thresholds:
        style = common.GraphThresholdsStyleConfig().mode(enums.GraphThresholdsStyleMode.DASHED)
        drawn.thresholds_style(style)
    return drawn


def _stacked(panel: Panel) -> SdkPanel:
    stacking = common.StackingConfig().mode(enums.StackingMode.NORMAL).group("A")
    return _graph(panel).fill_opacity(60).stacking(stacking)


def _graph(panel: Panel) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(enums.LegendDisplayMode.TABLE)
        .placement(enums.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs([LAST, "mean"])
    )
    tooltip = common.VizTooltipOptions().mode(enums.TooltipDisplayMode.MULTI).sort(enums.SortOrder.DESCENDING)
    drawn = (
        timeseries.Panel()
        .legend(legend)
        .tooltip(tooltip)
        .line_width(1)
        .show_points(enums.VisibilityMode.AUTO)
        .span_nulls(False)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
    )
    if panel.low == 0 and panel.high is None and panel.unit in (PanelUnit.NUMBER, PanelUnit.SAMPLES):
        drawn.axis_soft_max(1)  # so that a line of zeros lies at the bottom, not in the middle
    return drawn


def _bars(panel: Panel) -> SdkPanel:
    continuous = models.FieldColorModeId.THRESHOLDS if panel.thresholds else models.FieldColorModeId.CONTINUOUS_BL_PU
    return (
        bargauge.Panel()
        .reduce_options(_reduced())
        .display_mode(enums.BarGaugeDisplayMode.BASIC)
        .value_mode(enums.BarGaugeValueMode.COLOR)
        .orientation(enums.VizOrientation.HORIZONTAL)
        .show_unfilled(True)
        .sizing(enums.BarGaugeSizing.MANUAL)
        .min_viz_height(16)
        .max_viz_height(BAR_PIXELS)
        .text(common.VizTextDisplayOptions().title_size(13).value_size(16))
        .color_scheme(dashboard.FieldColor().mode(continuous))
    )


def _heatmap(panel: Panel) -> SdkPanel:
    axis = heatmap.YAxisConfig().unit(panel.unit).axis_placement(enums.AxisPlacement.LEFT)
    colours = heatmap.HeatmapColorOptions().mode(heatmap_enums.HeatmapColorMode.SCHEME).scheme("Blues").steps(64)
    return heatmap.Panel().calculate(False).y_axis(axis).color(colours).show_legend().cell_gap(1)


def _states(panel: Panel) -> SdkPanel:
    legend = common.VizLegendOptions().display_mode(enums.LegendDisplayMode.LIST).show_legend(True)
    return (
        statetimeline.Panel()
        .legend(legend.placement(enums.LegendPlacement.BOTTOM))
        .merge_values(True)
        .show_value(enums.VisibilityMode.NEVER)
        .row_height(0.8)
        .fill_opacity(80)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    )


def _table(panel: Panel) -> SdkPanel:
    """Return a table with the merged results of the queries, in the columns of the panel."""
    order = {name: index for index, name in enumerate(panel.columns)}
    organize = {"includeByName": dict.fromkeys(panel.columns, True), "indexByName": order}
    drawn = (
        table.Panel()
        .cell_height(enums.TableCellHeight.SM)
        .show_header(True)
        .with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            models.DataTransformerConfig(
                id_val="organize", options={**organize, "excludeByName": {}, "renameByName": dict(panel.columns)}
            )
        )
    )
    for heading, unit in panel.column_units.items():
        drawn.override_by_name(heading, [models.DynamicConfigValue(id_val="unit", value=unit)])
    for title, url in panel.links.items():
        first = next(iter(panel.columns.values()))
        value = [{"title": title, "url": url}]
        drawn.override_by_name(first, [models.DynamicConfigValue(id_val="links", value=value)])
    return drawn


_KINDS: Final[Mapping[PanelKind, Callable[[Panel], SdkPanel]]] = {
    PanelKind.STAT: _stat,
    PanelKind.LINES: _lines,
    PanelKind.STACKED: _stacked,
    PanelKind.BARS: _bars,
    PanelKind.HEATMAP: _heatmap,
    PanelKind.TABLE: _table,
    PanelKind.STATES: _states,
}
