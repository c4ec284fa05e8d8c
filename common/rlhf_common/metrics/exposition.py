"""Writes metrics of the catalogue for Prometheus: families of values read at a scrape, and histograms that are fed.

Rule: the one module here that knows the client of Prometheus. A scrape runs on a thread of its own: it reads what it is
given and changes nothing. A metric that the process is not declared to serve is refused, in the test and not at night.
A value that is not there gives no series; a failure to read one fails the scrape, which Prometheus shows as `up` 0.
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
"""Values of labels, in the order of the metric's labels -> value."""
Ids = tuple[tuple[str, str], ...]
"""What a value was measured on: (name, value) pairs."""
READ_TRIES: Final = 100
"""Times a scrape reads again what changed under it; a change takes a microsecond, a scrape comes every half minute."""
CERTIFICATE_FILE: Final = "tls.crt"
"""In the folder that RLHF_CERTIFICATES names."""
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
    """The series of a histogram that one thread feeds and others read; a microsecond a value, without a lock."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._series: dict[tuple[str, ...], _Counts] = {}
        if not metric.labels:
            self._series[()] = _Counts(metric)

    def observe(self, value: float, labels: tuple[str, ...] = (), exemplar: Ids = ()) -> None:
        """Take in one value. `exemplar`: what it was measured on, as (name, value) pairs of 128 characters at most."""
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
        """Return what a scrape is told: buckets are cumulated, each with the newest exemplar that fell into it."""
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
    """Of one set of labels."""

    __slots__ = ("counts", "exemplars", "sum")

    def __init__(self, metric: Metric) -> None:
        self.counts = [0] * (len(metric.buckets) + 1)
        self.exemplars: list[tuple[Ids, float, float]] = [((), 0.0, 0.0)] * len(self.counts)
        """By bucket: what fell into it last, its value, and when that was, in seconds since 1970."""
        self.sum = 0.0


def settled(read: Callable[[], _Read]) -> _Read:
    """Return what `read` returns, which iterates over what another thread may change meanwhile: then it reads again."""
    for _ in range(READ_TRIES - 1):
        try:
            return read()
        except RuntimeError:  # "changed size during iteration"
            time.sleep(0)
    return read()


class BuildInfo(Collector):
    """The version of the package."""

    def collect(self) -> Iterator[Family]:
        """Yield the one series."""
        yield family(BUILD_INFO, {(version("rlhf-operator"),): 1.0})


def registry_of(collectors: Iterable[Collector]) -> CollectorRegistry:
    """Return a registry of these collectors, and what every process serves of itself."""
    registry = CollectorRegistry()
    for collector in (*collectors, BuildInfo(), ProcessCollector(registry=None)):
        registry.register(collector)
    return registry


def disabled(_: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    """Serve a job without metrics: a page that says so, with a status by which Prometheus shows the target as down."""
    start("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
    return [b"spec.metrics of this job is Disabled\n"]


def application(registry: CollectorRegistry) -> Application:
    """Return what an endpoint serves: text, or OpenMetrics with exemplars for a scraper that asks for it."""
    served: Application = make_wsgi_app(registry)
    return served


def text_application(registry: CollectorRegistry) -> Application:
    """Return the same in text alone: in OpenMetrics the client writes the colon of an engine's names as `_`, unless the
    scraper says that it takes any character."""
    served = application(registry)
    return lambda request, start: served({**request, "HTTP_ACCEPT": "text/plain"}, start)


def certificate_expiry(certificates: Path | None) -> Values:
    """Return when the certificate in this folder ends; nothing without one, or where it cannot be read just now."""
    if certificates is None:
        return {}
    try:
        return {(): expiry_of_file(certificates / CERTIFICATE_FILE)}
    except (OSError, ValueError):
        return {}
