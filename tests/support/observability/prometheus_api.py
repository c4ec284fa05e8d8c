"""Queries of a running Prometheus and Alertmanager over their HTTP APIs, for tests.

Rule: an unsuccessful answer is an error with its message; an empty result is the server's answer, never a hidden
failure. Series come and go with scrapes, so a test waits for them (`until`) instead of looking once.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ANSWER_TIMEOUT = 120.0  # seconds for one answer
EVERY = 0.5  # seconds between two attempts


class PrometheusError(RuntimeError):
    """The server refused, or sent an unreadable answer; the message has the request and the answer."""


@dataclass(frozen=True)
class Series:
    """One series of an answer: its labels, and (time in seconds since 1970, value) of each sample."""

    labels: Mapping[str, str]
    samples: tuple[tuple[float, float], ...]

    @property
    def value(self) -> float:
        """Return the last value."""
        return self.samples[-1][1]


@dataclass(frozen=True)
class PrometheusApi:
    """A Prometheus at `url`."""

    url: str

    def query(self, expression: str) -> list[Series]:
        """Evaluate PromQL now; return an instant vector, or a scalar as one series without labels."""
        data = self._get("query", query=expression)
        if data["resultType"] == "scalar":
            return [Series({}, (_sample(data["result"]),))]
        return [Series(item["metric"], (_sample(item["value"]),)) for item in data["result"] if "value" in item]

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        """Evaluate PromQL at every `step` seconds from `start` to `end`, both in seconds since 1970."""
        data = self._get("query_range", query=expression, start=str(start), end=str(end), step=str(step))
        return [Series(item["metric"], tuple(map(_sample, item["values"]))) for item in data["result"]]

    def value(self, expression: str) -> float | None:
        """Return the value of the only series of an instant query; None if there is none. Raises ValueError for
        several.
        """
        found = self.query(expression)
        if len(found) > 1:
            raise ValueError(f"{expression}: {len(found)} series, wanted one: {[item.labels for item in found]}")
        return found[0].value if found else None

    def series(self, selector: str) -> list[dict[str, str]]:
        """Return the labels of all matching series, regardless of the time of their samples."""
        found: list[dict[str, str]] = self._get("series", **{"match[]": selector})
        return found

    def targets(self) -> list[dict[str, Any]]:
        """Return the scraped targets, each with `labels`, `health` and `lastError`."""
        found: list[dict[str, Any]] = self._get("targets", state="active")["activeTargets"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Return all rules of all groups, each with its `name`, `health` and, after a failure, `lastError`."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def alerts(self, name: str = "") -> list[dict[str, Any]]:
        """Return the alerts that are pending or firing (`state`), all or those of one rule."""
        found = self._get("alerts")["alerts"]
        return [alert for alert in found if name in ("", alert["labels"]["alertname"])]

    def reload(self) -> None:
        """Reload the configuration and the rule files."""
        _answer(urllib.request.Request(f"{self.url}/-/reload", method="POST"))

    def ready(self) -> bool:
        """Return whether it serves queries."""
        return _ready(f"{self.url}/-/ready")

    def until(
        self, expression: str, seconds: float, holds: Callable[[list[Series]], object] = bool, why: str = ""
    ) -> list[Series]:
        """Wait until an instant query's answer holds, by default until it is not empty; return it.

        Raises TimeoutError with the last answer and the targets that are down.
        """
        deadline = time.monotonic() + seconds
        while not holds(found := self.query(expression)):
            if time.monotonic() > deadline:
                down = [f"{item['scrapeUrl']}: {item['lastError']}" for item in self.targets() if item["lastError"]]
                raise TimeoutError(f"waited {seconds:.0f} s for {why or expression}: {found[:5]}; down: {down}")
            time.sleep(EVERY)
        return found

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        return _parsed(url)["data"]


@dataclass(frozen=True)
class AlertmanagerApi:
    """An Alertmanager at `url`."""

    url: str

    def alerts(self, name: str = "") -> list[dict[str, Any]]:
        """Return the alerts that have not ended, all or those of one rule, with `labels` and `annotations`."""
        found: list[dict[str, Any]] = _parsed(f"{self.url}/api/v2/alerts?active=true")
        return [alert for alert in found if name in ("", alert["labels"]["alertname"])]

    def ready(self) -> bool:
        """Return whether it accepts alerts."""
        return _ready(f"{self.url}/-/ready")


def _sample(pair: list[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


def _ready(url: str) -> bool:
    try:
        _answer(urllib.request.Request(url))
    except PrometheusError:
        return False
    return True


def _parsed(url: str) -> Any:
    text = _answer(urllib.request.Request(url))
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PrometheusError(f"{url}: {text[:500]}") from error


def _answer(request: urllib.request.Request) -> str:
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise PrometheusError(f"{urllib.parse.unquote(request.full_url)}: {error.read().decode()[:2000]}") from error
    except OSError as error:
        raise PrometheusError(f"{request.full_url}: {error}") from error
