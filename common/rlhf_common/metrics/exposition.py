"""Prometheus families of the catalogue's metrics.

Values are read at a scrape; histograms fill over time.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rlhf_common.certificate_expiry import expiry_of_file
from rlhf_common.endpoint import Application
from rlhf_common.metrics.metric import Metric, MetricKind
from rlhf_common.metrics.process import BUILD_INFO

Values = Mapping[tuple[str, ...], float]
"""Label values, in the order of the metric's labels -> value."""
Ids = tuple[tuple[str, str], ...]
"""Identity of a measured object: (name, value) pairs."""
READ_TRIES: Final = 100
"""Maximum attempts of a scrape to read data that changes."""
CERTIFICATE_FILE: Final = "tls.crt"
"""File name in the folder RLHF_CERTIFICATES."""
_Read = TypeVar("_Read")

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


def family(metric: Metric, values: Values) -> Family:
    """Return the series of a gauge or counter."""
    if metric.kind is MetricKind.HISTOGRAM:
        raise ValueError(f"{metric.name} is a histogram, which is fed as things happen")
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    result = kind(metric.name.removesuffix("_total"), metric.meaning, labels=metric.label_names)
    for labels, value in values.items():
        result.add_metric(labels, float(value))
    return result


class HistogramSeries:
    """The series of a histogram that one thread fills and others read, without a lock."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._series: dict[tuple[str, ...], _Counts] = {}
        if not metric.labels:
            self._series[()] = _Counts(metric)

    def observe(self, value: float, labels: tuple[str, ...] = (), exemplar: Ids = ()) -> None:
        """Add one value. `exemplar`: identity of the measured object, (name, value) pairs of at most 128 characters."""
        series = self._series.get(labels)
        if series is None:
            if len(labels) != len(self.metric.labels):
                raise ValueError(f"{self.metric.name} has the labels {self.metric.label_names}, given is {labels}")
            series = self._series[labels] = _Counts(self.metric)
        place = bisect_left(self.metric.buckets, value)
        series.counts[place] += 1
        series.sum += value
        if exemplar:
            series.exemplars[place] = (exemplar, value, time.time())

    def family(self) -> Family:
        """Return the family for a scrape: cumulated buckets, each with its newest exemplar."""
        result = HistogramMetricFamily(self.metric.name, self.metric.meaning, labels=self.metric.label_names)
        bounds = [*(str(bound) for bound in self.metric.buckets), "+Inf"]
        for labels, series in list(self._series.items()):
            total, count = series.sum, accumulate(list(series.counts))
            exemplars = list(series.exemplars)
            shown = [Exemplar(dict(ids), value, at) if ids else None for ids, value, at in exemplars]
            buckets: list[Any] = list(zip(bounds, count, shown, strict=True))
            result.add_metric(labels, buckets, total)
        return result


class _Counts:
    """Counts for one set of labels."""

    __slots__ = ("counts", "exemplars", "sum")

    def __init__(self, metric: Metric) -> None:
        self.counts = [0] * (len(metric.buckets) + 1)
        self.exemplars: list[tuple[Ids, float, float]] = [((), 0.0, 0.0)] * len(self.counts)
        """Newest exemplar per bucket: identity, value, and time in seconds since 1970."""
        self.sum = 0.0


def settled(read: Callable[[], _Read]) -> _Read:
    """Return the result of `read`, which iterates over data that another thread may change. Retry it after a
    RuntimeError."""
    for _ in range(READ_TRIES - 1):
        try:
            return read()
        except RuntimeError:  # "changed size during iteration"
            time.sleep(0)
    return read()


class BuildInfo(Collector):
    """The version of the package, as a metric."""

    def collect(self) -> Iterator[Family]:
        """Yield its single series."""
        yield family(BUILD_INFO, {(version("rlhf-operator"),): 1.0})


def registry_of(collectors: Iterable[Collector]) -> CollectorRegistry:
    """Return a registry of these collectors and the metrics that every process has."""
    registry = CollectorRegistry()
    for collector in (*collectors, BuildInfo(), ProcessCollector(registry=None)):
        registry.register(collector)
    return registry


def disabled(_: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    """Answer that the job serves no metrics. The status makes Prometheus show the target as down."""
    start("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
    return [b"spec.metrics of this job is Disabled\n"]


def application(registry: CollectorRegistry) -> Application:
    """Return the application of an endpoint: text, or OpenMetrics with exemplars if the scraper asks for it."""
    served: Application = make_wsgi_app(registry)
    return served


def text_application(registry: CollectorRegistry) -> Application:
    """Return an application with text only."""
    served = application(registry)
    return lambda request, start: served({**request, "HTTP_ACCEPT": "text/plain"}, start)


def certificate_expiry(certificates: Path | None) -> Values:
    """Return the expiry of the certificate in this folder; empty without one, or if it cannot be read."""
    if certificates is None:
        return {}
    try:
        return {(): expiry_of_file(certificates / CERTIFICATE_FILE)}
    except (OSError, ValueError):
        return {}
