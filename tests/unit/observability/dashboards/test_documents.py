"""The Grafana documents are up to date, in place, importable anywhere, and small enough for a ConfigMap."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import typer
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from rlhf_cli.main import app
from rlhf_observability.dashboards import all_dashboards, file_name
from rlhf_observability.dashboards.__main__ import main
from rlhf_observability.dashboards.document import document, places
from rlhf_observability.dashboards.panels import GRID_WIDTH, Dashboard, PanelKind, Row, stat

FOLDER = Path(__file__).parents[4] / "charts/rlhf-operator/dashboards"
CONFIG_MAP_BYTES = 1 << 20  # the API server's limit on one ConfigMap
DESCRIPTION = r".+\.\n\n\*\*Normal:\*\* .+\.\n\n\*\*If not:\*\* .+\.(\n\n\*\*Empty\*\* .+\.)?"
PATH = r"\b(?:spec\.)?([a-z]\w+(?:\.\w+)+)"
"""Pattern for a field of the manifest in a sentence."""
DASHBOARDS = pytest.mark.parametrize("dashboard", all_dashboards(), ids=lambda dashboard: str(dashboard.uid))


def test_the_files_of_the_chart_are_what_the_code_makes(tmp_path: Path) -> None:
    main(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in FOLDER.iterdir()}, "stale: make dashboards"


def test_a_dashboard_that_is_no_more_leaves_the_folder(tmp_path: Path) -> None:
    (tmp_path / "gone.json").write_text("{}")
    main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {file_name(dashboard) for dashboard in all_dashboards()}


def test_addresses_and_titles_are_unique() -> None:
    for names in ([each.uid for each in all_dashboards()], [each.title for each in all_dashboards()]):
        assert len(set(names)) == len(names)
    for dashboard in all_dashboards():
        assert re.fullmatch(r"rlhf-[a-z]{1,35}", dashboard.uid), "at most 40 letters, which Grafana keeps"


@DASHBOARDS
def test_a_dashboard_can_be_imported_anywhere(dashboard: Dashboard) -> None:
    text = document(dashboard)
    exported: dict[str, Any] = json.loads(text)
    assert len(text.encode()) < CONFIG_MAP_BYTES
    assert "id" not in exported
    assert "__inputs" not in exported
    assert exported["uid"] == dashboard.uid
    assert set(re.findall(r'"type": "prometheus",\s*"uid": "([^"]*)"', text)) == {"${datasource}"}
    names = [variable["name"] for variable in exported["templating"]["list"]]
    assert names == ["datasource", *(variable.value for variable in dashboard.variables)]
    [link] = exported["links"]
    assert (link["includeVars"], link["keepTime"], link["tags"]) == (True, True, exported["tags"])


@DASHBOARDS
def test_panels_lie_beside_each_other(dashboard: Dashboard) -> None:
    panels = json.loads(document(dashboard))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        {
            (column, line)
            for column in range(place["x"], place["x"] + place["w"])
            for line in range(place["y"], place["y"] + place["h"])
        }
        for place in (panel["gridPos"] for panel in panels)
    ]
    assert all(first.isdisjoint(second) for first, second in combinations(cells, 2))
    assert all(column < GRID_WIDTH for cell in cells for column, _ in cell)


@DASHBOARDS
def test_a_dashboard_answers_at_a_glance_and_says_of_each_panel_what_is_normal(dashboard: Dashboard) -> None:
    assert 8 <= len(dashboard.panels) <= 16
    assert dashboard.rows[0].panels[0].kind is PanelKind.STAT, "what is wrong now comes first"
    assert len({panel.title for panel in dashboard.panels}) == len(dashboard.panels)
    for panel in dashboard.panels:
        assert re.fullmatch(
            r".+\.\n\n\*\*Normal:\*\* .+\.\n\n\*\*If not:\*\* .+\.(\n\n\*\*Empty\*\* .+\.)?", panel.description
        ), panel.title
        assert panel.queries
        assert len(panel.queries) <= 6


@DASHBOARDS
def test_a_document_has_no_field_that_grafana_does_not_know(dashboard: Dashboard) -> None:
    exported: dict[str, Any] = json.loads(document(dashboard))
    again = json.loads(JSONEncoder().encode(models.Dashboard.from_json(exported)))
    for variable in again["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min"):  # of intervals; the library's type writes it for all
            variable.pop(name, None)
    for panel in again["panels"]:
        for name in ("transparent", "repeatDirection"):  # Grafana's defaults, which the library's type writes
            panel.pop(name, None)
    ours, read = exported.pop("annotations"), again.pop("annotations")
    assert again == exported
    untyped = {"step", "titleFormat"}  # of Prometheus' annotations, which the library's type leaves out
    for annotation, parsed in zip(ours["list"], read["list"], strict=True):
        assert annotation.items() >= {key: value for key, value in parsed.items() if key in annotation}.items()
        assert set(annotation) - set(parsed) == untyped


@DASHBOARDS
def test_a_dashboard_is_explained(dashboard: Dashboard) -> None:
    page = (FOLDER.parents[2] / "docs/dashboards.md").read_text()
    _, _, after = page.partition(f"\n## {dashboard.title.removeprefix('RLHF / ')}\n")
    section = after.split("\n## ")[0]
    assert "**Normal**" in section, f"docs/dashboards.md has nothing on {dashboard.title}"
    assert f"(pictures/dashboards/{file_name(dashboard).removesuffix('.json')}.png)" in section


def test_links_lead_to_dashboards_and_set_variables_that_they_have() -> None:
    variables_by_dashboard = {
        each.uid: {"datasource", *(variable.value for variable in each.variables)} for each in all_dashboards()
    }
    links = [link for each in all_dashboards() for panel in each.panels for link in panel.links.values()]
    assert links
    for link in links:
        place = re.fullmatch(r"/d/([a-z-]+)\?(.*)", link)
        assert place is not None
        assert set(re.findall(r"var-(\w+)=", place[2])) <= variables_by_dashboard[place[1]]
        assert "${__url_time_range}" in place[2]


def test_what_people_are_told_to_type_exists() -> None:
    verbs = set(typer.main.get_group(app).commands)
    mentioned = {
        verb
        for dashboard in all_dashboards()
        for panel in dashboard.panels
        for verb in re.findall(r"`rlhf (\w+)", panel.description)
    }
    assert mentioned
    assert mentioned <= verbs


def test_fields_that_people_are_sent_to_exist() -> None:
    fields = set(re.findall(r"^\| `([\w.]+)` ", (FOLDER.parents[2] / "docs/reference.md").read_text(), re.MULTILINE))
    sections = {field.split(".")[0] for field in fields}
    words = [word for each in all_dashboards() for panel in each.panels for word in re.findall(PATH, panel.description)]
    mentioned = {word for word in words if word.split(".")[0] in sections} - {"metrics.jsonl"}
    assert "checkpoints.every" in mentioned
    assert mentioned <= fields


def panel(width: int, height: int = 4) -> Any:
    return stat(title="x", unit="short", shows="x.", normal="x.", cure="x.", queries=(), width=width, height=height)


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        ((panel(20), panel(8)), "ends at column 28 of 24"),
        ((panel(12), panel(6)), "ends at column 18 of 24"),
        ((panel(12, 4), panel(12, 8)), "is 8 high beside one of 4"),
    ],
)
def test_a_row_with_a_hole_is_refused(panels: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(places(Row("x", panels), 0))
