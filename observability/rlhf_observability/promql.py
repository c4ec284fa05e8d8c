"""Queries, made of metrics of the catalogue: a name, a label or a value of it that no process serves fails at import.

Rule: what is said of a job is joined over `cluster`, `namespace` and `rlhf_job`, never over `pod` or `instance`, which
change when a process comes back; counters are read through `rate` and `increase` alone, and histograms by `le`.
Functions here return text and know nothing of who asks.
"""

from dataclasses import dataclass
from typing import Final

from rlhf_common.metrics.metric import Metric, MetricKind, Server

RATE_INTERVAL: Final = "$__rate_interval"
"""Grafana's: four scrapes at least, longer where a pixel is longer."""
CLUSTER, NAMESPACE, RLHF_JOB, POD = "cluster", "namespace", "rlhf_job", "pod"
JOB: Final = (CLUSTER, NAMESPACE, RLHF_JOB)
"""What tells a job from all others. `cluster` is absent where one Prometheus has one cluster."""
SCRAPED: Final = (*JOB, POD, "instance", "job")
"""Labels that a scrape adds."""


_MARKS: Final = {"!~": "!~", "!": "!=", "~": "=~", "": "="}
"""How the value of a label begins -> the operator of its matcher."""


@dataclass(frozen=True)
class SeriesScope:
    """The series that a dashboard speaks of, by the variables above it."""

    matchers: tuple[str, ...]

    def narrowed(self, matcher: str) -> "SeriesScope":
        """Return the series of this scope that a matcher takes."""
        return SeriesScope((*self.matchers, matcher))

    def value(self, metric: Metric, **labels: str) -> str:
        """Return a selector of a gauge. Raises ValueError for a counter or a histogram, which have no value to show."""
        if metric.kind is not MetricKind.GAUGE:
            raise ValueError(f"{metric.name} is a {metric.kind}: show its rate, its increase or a quantile")
        return self._select(metric, metric.name, labels)

    def total(self, metric: Metric, **labels: str) -> str:
        """Return a selector of a counter for what reads it as a number: since a process began, nothing else."""
        return self._select(_counted(metric), metric.name, labels)

    def rate(self, metric: Metric, **labels: str) -> str:
        """Return a counter's growth a second."""
        return f"rate({self._select(_counted(metric), metric.name, labels)}[{RATE_INTERVAL}])"

    def increase(self, metric: Metric, window: str = RATE_INTERVAL, **labels: str) -> str:
        """Return a counter's growth over a window, such as "1h" or "$__range"."""
        return f"increase({self._select(_counted(metric), metric.name, labels)}[{window}])"

    def latest(self, metric: Metric, *by: str, **labels: str) -> str:
        """Return a gauge of jobs, a series a job and further labels, whichever process serves it now."""
        return highest(self.value(metric, **labels), *JOB, *by)

    def rates(self, metric: Metric, *by: str, **labels: str) -> str:
        """Return a counter's growth a second, a series a job and further labels."""
        return total(self.rate(metric, **labels), *JOB, *by)

    def increases(self, metric: Metric, *by: str, window: str = RATE_INTERVAL, **labels: str) -> str:
        """Return a counter's growth over a window, a series a job and further labels."""
        return total(self.increase(metric, window, **labels), *JOB, *by)

    def quantile(self, share: float, metric: Metric, *by: str, window: str = RATE_INTERVAL, **labels: str) -> str:
        """Return a percentile of a histogram, by the labels given."""
        buckets = self.buckets(metric, *by, window=window, **labels)
        return f"histogram_quantile({share:g}, {buckets})"

    def buckets(self, metric: Metric, *by: str, window: str = RATE_INTERVAL, **labels: str) -> str:
        """Return how often each bucket of a histogram was hit a second, for percentiles and heat maps."""
        selected = self._select(_histogram(metric), f"{metric.name}_bucket", labels)
        return total(f"rate({selected}[{window}])", "le", *by)

    def mean(self, metric: Metric, *by: str, window: str = RATE_INTERVAL, **labels: str) -> str:
        """Return the mean of what a histogram saw, by the labels given."""
        sums, counts = (self._select(_histogram(metric), f"{metric.name}_{part}", labels) for part in ("sum", "count"))
        return f"{total(f'rate({sums}[{window}])', *by)} / {total(f'rate({counts}[{window}])', *by)}"

    def count_rate(self, metric: Metric, **labels: str) -> str:
        """Return how many values a histogram saw a second."""
        return f"rate({self._select(_histogram(metric), f'{metric.name}_count', labels)}[{RATE_INTERVAL}])"

    def seen(self, metric: Metric, window: str = RATE_INTERVAL, **labels: str) -> str:
        """Return how many values a histogram saw over a window."""
        return f"increase({self._select(_histogram(metric), f'{metric.name}_count', labels)}[{window}])"

    def _select(self, metric: Metric, name: str, labels: dict[str, str]) -> str:
        chosen = [_matcher(metric, label, value) for label, value in labels.items()]
        return f"{name}{{{','.join((*self.matchers, *chosen))}}}"


FLEET: Final = SeriesScope(('cluster=~"$cluster"', 'namespace=~"$namespace"'))
"""All jobs of the namespaces."""
JOBS: Final = SeriesScope((*FLEET.matchers, 'rlhf_job=~"$job"'))
"""The jobs that were chosen."""
WORKERS: Final = SeriesScope((*JOBS.matchers, 'worker=~"$worker"'))
"""The workers that were chosen, of the jobs that were."""
OPERATORS: Final = SeriesScope(('cluster=~"$cluster"', 'rlhf_job=""'))
"""The operator's own series, which are of no job."""


def labels_of(metric: Metric) -> frozenset[str]:
    """Return all labels that series of a metric have once they are scraped."""
    return frozenset((*metric.label_names, *SCRAPED, *(("le",) if metric.kind is MetricKind.HISTOGRAM else ())))


def total(expression: str, *by: str) -> str:
    """Return a sum, by the labels given; by none, one number."""
    return _aggregate("sum", expression, by)


def highest(expression: str, *by: str) -> str:
    """Return a maximum: of gauges, which a coordinator that came back serves anew, the one series that is left."""
    return _aggregate("max", expression, by)


def lowest(expression: str, *by: str) -> str:
    """Return a minimum, by the labels given."""
    return _aggregate("min", expression, by)


def average(expression: str, *by: str) -> str:
    """Return a mean, by the labels given."""
    return _aggregate("avg", expression, by)


def number_of(expression: str, *by: str) -> str:
    """Return how many series there are, by the labels given."""
    return _aggregate("count", expression, by)


def top(size: int, expression: str) -> str:
    """Return the largest few: the bound on what a panel draws of a thousand workers."""
    return f"topk({size}, {expression})"


def bottom(size: int, expression: str) -> str:
    """Return the smallest few."""
    return f"bottomk({size}, {expression})"


def or_zero(expression: str, *labels: str) -> str:
    """Return 0 where a count has no series yet, as before the first restart; never of a measurement.

    The series of nothing has the labels given, each with the value "none".
    """
    nothing = "vector(0)"
    for label in labels:
        nothing = f'label_replace({nothing}, "{label}", "none", "", "")'
    return f"{expression} or on () {nothing}"


def _aggregate(operation: str, expression: str, by: tuple[str, ...]) -> str:
    return f"{operation} by ({', '.join(by)}) ({expression})" if by else f"{operation}({expression})"


def _counted(metric: Metric) -> Metric:
    if metric.kind is not MetricKind.COUNTER:
        raise ValueError(f"{metric.name} is a {metric.kind}, no counter: it has no rate")
    return metric


def _histogram(metric: Metric) -> Metric:
    if metric.kind is not MetricKind.HISTOGRAM:
        raise ValueError(f"{metric.name} is a {metric.kind}, no histogram")
    return metric


def _matcher(metric: Metric, name: str, value: str) -> str:
    """Return `name="value"`; a value that begins with ~ is a pattern of alternatives, with ! or !~ one to leave out."""
    known = {label.name: label.values for label in metric.labels}
    if name not in known and not (name in SCRAPED and metric.servers != (Server.OPERATOR,)) and name != POD:
        raise ValueError(f"{metric.name} has no label {name}: {', '.join(labels_of(metric))}")
    sign, text = next((op, value.removeprefix(mark)) for mark, op in _MARKS.items() if value.startswith(mark))
    strange = [item for item in text.split("|") if "$" not in item and known.get(name) and item not in known[name]]
    if strange:
        raise ValueError(f"{metric.name}: {name} is never {', '.join(strange)}: {', '.join(known[name])}")
    return f'{name}{sign}"{text}"'
