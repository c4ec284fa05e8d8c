"""The chart's alerts with the thresholds of a test, as seen in Alertmanager.

Rule: queries, texts and labels are those of the chart; a test sets values only. An alert fires while Alertmanager lists
it, and is over when it no longer does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.cluster import Cluster
from tests.cluster.monitored.monitoring import Monitoring
from tests.cluster.processes import wait_until

from rlhf_observability.alerts.families import FAMILIES
from rlhf_observability.alerts.rule_file import rule_file

PATIENCE = 600.0  # seconds for any one fact
PAGE = Path(__file__).parents[3] / "docs" / "alerts.md"


def at_once(values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the values of all alerts: as given, and else firing as soon as their condition holds."""
    alerts = [alert.name for family in FAMILIES for alert in family.alerts]
    return {name: {"for": "0s", **values.get(name, {})} for name in alerts}


def documented(test: str) -> set[str]:
    """Return the alerts that docs/alerts.md assigns to a test of this name."""
    [row] = [line for line in PAGE.read_text().splitlines() if f"`tests/cluster/monitored/{test}`) |" in line]
    return set(re.findall(r"RLHF[A-Za-z]+", row.split("|")[2]))


class FiringAlerts:
    """The alerts of the chart with a test's thresholds, as seen in Alertmanager."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        overrides: dict[str, dict[str, Any]],
        scrape: Sequence[dict[str, Any]],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises if the watched processes have ended, so that no alert can come."""
        self._check = check
        self._given, self._rules = overrides, folder / "rules.yaml"
        self._write()
        self.monitoring = Monitoring(cluster, scrape=scrape, rules=[self._rules], interval="1s")
        self.fired: set[str] = set()
        """Names of alerts that `until_over` has seen to be over."""

    def change(self, name: str, **values: Any) -> None:
        """Change the values of one alert while Prometheus runs."""
        self._given = self._given | {name: {**self._given[name], **values}}
        self._write()
        self.monitoring.prometheus.reload()

    def firing(self, name: str, **labels: str) -> bool:
        """Return whether Alertmanager lists an alert with these labels."""
        active = self.monitoring.alertmanager.alerts(name)
        return any(labels.items() <= alert["labels"].items() for alert in active)

    def until_firing(self, *names: str, **labels: str) -> None:
        """Wait until each of these has fired, at the same time or one after the other."""
        left = set(names)

        def all_seen() -> bool:
            left.difference_update([name for name in left if self.firing(name, **labels)])
            return not left

        self._wait(f"{sorted(names)} with {labels} to fire", all_seen)

    def until_quiet(self, *names: str, **labels: str) -> None:
        """Wait until none of these fires, so that a later alert has a new cause."""
        self._wait(
            f"{sorted(names)} with {labels} to be quiet", lambda: not any(self.firing(n, **labels) for n in names)
        )

    def until_scraped(self, expression: str) -> None:
        """Wait until Prometheus has a series: a counter counts from its first sample on."""
        self.monitoring.prometheus.until(expression, PATIENCE)

    def until_over(self, *names: str, **labels: str) -> None:
        """Wait until each of these was over."""
        left = set(names)

        def none_left() -> bool:
            left.difference_update([name for name in left if not self.firing(name, **labels)])
            return not left

        self._wait(f"{sorted(names)} with {labels} to be over", none_left)
        self.fired |= set(names)

    def _write(self) -> None:
        self._rules.write_text(yaml.safe_dump(rule_file(FAMILIES, self._given)))

    def _wait(self, event: str, holds: Callable[[], object]) -> None:
        try:
            wait_until(event, holds, PATIENCE, every=0.5, check=self._check)
        except TimeoutError as error:
            active = sorted({alert["labels"]["alertname"] for alert in self.monitoring.alertmanager.alerts()})
            raise TimeoutError(f"{error}; fire now: {active}") from error
