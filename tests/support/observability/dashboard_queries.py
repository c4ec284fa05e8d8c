"""Queries of dashboards with All selected, read from the JSON that Grafana imports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = re.compile(r"\$\{?(\w+)\}?")


@dataclass(frozen=True)
class Asked:
    """One query of one panel."""

    dashboard: str
    panel: str
    query: str
    """Letter of the query in its panel."""
    expression: str
    """Expression without variables."""


def queries(path: Path, *, rate_interval: str, whole_range: str) -> Iterator[Asked]:
    """Yield every query of a dashboard's file; raises KeyError for a variable that the dashboard lacks."""
    dashboard: dict[str, Any] = json.loads(path.read_text())
    chosen = {item["name"]: item.get("allValue", "") for item in dashboard["templating"]["list"]}
    chosen |= {"__rate_interval": rate_interval, "__range": whole_range}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = VARIABLE.sub(lambda found: chosen[found[1]], target["expr"])
            yield Asked(path.stem, panel["title"], target["refId"], expression)
