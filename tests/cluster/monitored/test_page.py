"""The page of dashboards reports data, no data, or an error, which the test of real dashboards relies on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.monitored.monitoring import Monitoring
from tests.cluster.monitored.page import DashboardServer, check
from tests.cluster.toolchain import ToolchainError

pytestmark = pytest.mark.full

SHIPPED = sorted((Path(__file__).parents[3] / "charts" / "rlhf-operator" / "dashboards").glob("*.json"))
PATIENCE = 240.0  # seconds until Prometheus has scraped itself
INSTANT = {"instant": True, "format": "table"}
JOINED = [{"id": "merge", "options": {}}]
PANELS: list[dict[str, Any]] = [
    {"type": "stat", "targets": [{"expr": 'up{job=~"$job"}'}]},
    {"type": "bargauge", "targets": [{"expr": "up", "instant": True}]},
    {"type": "timeseries", "targets": [{"expr": "process_open_fds"}, {"expr": "absent(up)"}]},
    {
        "type": "table",
        "targets": [{"expr": "up", **INSTANT}, {"expr": "go_info", **INSTANT}],
        "transformations": JOINED,
    },
    {"type": "heatmap", "targets": [{"expr": "prometheus_http_request_duration_seconds_bucket"}]},
    {"type": "state-timeline", "targets": [{"expr": "up", "legendFormat": "{{job}}"}]},
]
EMPTY = {"type": "timeseries", "targets": [{"expr": "nobody_serves_this"}]}
BROKEN: dict[str, dict[str, Any]] = {
    "unexpected end of input": {"type": "stat", "targets": [{"expr": "up{"}]},
    "no variable worker": {"type": "stat", "targets": [{"expr": 'up{job="$worker"}'}]},
    "panels of type text are not drawn": {"type": "text"},
    "2 frames for one table": {"type": "table", "targets": PANELS[3]["targets"]},
    "with the label le": {"type": "heatmap", "targets": [{"expr": "up"}]},
}


def write(folder: Path, name: str, panels: list[dict[str, Any]]) -> None:
    """Write a dashboard of these panels, one below the other."""
    for number, panel in enumerate(panels):
        for letter, target in zip("ABC", panel.get("targets", []), strict=False):
            target["refId"] = letter
        panel |= {"id": number, "title": f"panel {number}", "gridPos": {"x": 0, "y": number * 4, "w": 24, "h": 4}}
    job = {"name": "job", "type": "query", "query": {"query": "label_values(up, job)"}, "includeAll": True}
    dashboard = {"uid": name, "title": name, "panels": panels, "templating": {"list": [job]}}
    dashboard["time"] = {"from": "now-1m", "to": "now"}
    (folder / f"{name}.json").write_text(json.dumps(dashboard))


@pytest.fixture
def itself(cluster: Cluster) -> dict[str, Any]:
    """Return the scrape_config of a Prometheus that scrapes itself."""
    address = Monitoring(cluster).prometheus.url.removeprefix("http://")
    return {"job_name": "itself", "static_configs": [{"targets": [address]}]}


def test_panels_say_whether_they_have_data_and_what_is_wrong(
    cluster: Cluster, itself: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, "whole", [*PANELS, EMPTY])
    write(tmp_path, "broken", list(BROKEN.values()))
    with Monitoring(cluster, scrape=[itself], interval="500ms") as monitoring:
        monitoring.prometheus.until(
            "count_over_time(prometheus_http_request_duration_seconds_bucket[1m]) > 2", PATIENCE
        )
        with DashboardServer(tmp_path, monitoring.prometheus.url) as server:
            whole, broken = server.draw(["whole", "broken"], tmp_path, {"scrape": "1"})
    assert [panel.state for panel in whole.panels] == ["data"] * len(PANELS) + ["nothing"]
    assert whole.problems == ()
    assert whole.picture.read_bytes().startswith(b"\x89PNG")
    for words, panel in zip(BROKEN, broken.panels, strict=True):
        assert panel.state == "error"
        assert words in panel.words


def test_the_dashboards_of_the_chart_are_what_grafanas_schema_says() -> None:
    assert SHIPPED
    check(SHIPPED)


def test_what_grafanas_schema_does_not_know_is_told(tmp_path: Path) -> None:
    dashboard = json.loads(SHIPPED[0].read_text())
    panel = next(panel for panel in dashboard["panels"] if panel["type"] == "stat")
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(dashboard).replace(json.dumps(panel), json.dumps(panel | {"options": {"hue": 1}})))
    with pytest.raises(ToolchainError, match='"hue"'):
        check([path])
    path.write_text(json.dumps(dashboard).replace('"timeseries"', '"graph"'))
    with pytest.raises(ToolchainError, match="no schema is known of type graph"):
        check([path])
