"""PromQL queries over metrics of the catalogue: a label that a metric does not have is a ValueError.

Rule: series of a job are joined over `cluster`, `namespace` and `rlhf_job`.
"""

from dataclasses import dataclass
from typing import Final

from rlhf_common.metrics.metric import Metric, MetricKind, Server

RATE_INTERVAL: Final = "$__rate_interval"
"""Grafana's variable for windows of rates."""
CLUSTER, NAMESPACE, RLHF_JOB, POD = "cluster", "namespace", "rlhf_job", "pod"
JOB: Final = (CLUSTER, NAMESPACE, RLHF_JOB)
"""Labels that identify a job. `cluster` may be absent."""
SCRAPED: Final = (*JOB, POD, "instance", "job")
"""Labels that a scrape adds."""


_MARKS: Final = {"!~": "!~", "!": "!=", "~": "=~", "": "="}
"""Prefix of a label's value -> the operator of its matcher."""


@dataclass(frozen=True)
class SeriesScope:
    """Series that match all matchers."""

    matchers: tuple[str, ...]

    def narrowed(self, matcher: str) -> "SeriesScope":
        """Return the series of this scope that match a matcher."""
        return SeriesScope((*self.matchers, matcher))

    def value(self, metric: Metric, **labels: str) -> str:
        """Return a selector of a gauge. Raises ValueError for a counter or a histogram, which have no value to show."""
        if metric.kind is not MetricKind.GAUGE:
            raise ValueError(f"{metric.name} is a {metric.kind}: show its rate, its increase or a quantile")
        return self._select(metric, metric.name, labels)

    def total(self, metric: Metric, **labels: str) -> str:
        """Return a selector of a counter. Raises ValueError for another kind of metric."""
        return self._select(_counted(metric), metric.name, labels)

    def rate(self, metric: Metric, **labels: str) -> str:
        """Return a counter's growth per second."""
        return f"rate({self._select(_counted(metric), metric.name, labels)}[{RATE_INTERVAL}])"

    def increase(self, metric: Metric, window: str = RATE_INTERVAL, **labels: str) -> str:
        """Return a counter's growth over a window, such as "1h" or "$__range"."""
        return f"increase({self._select(_counted(metric), metric.name, labels)}[{window}])"

    def latest(self, metric: Metric, *by: str, **labels: str) -> str:
        """Return a gauge of jobs, one series per job and further labels: the maximum of all with these labels."""
        return highest(self.value(metric, **labels), *JOB, *by)

    def rates(self, metric: Metric, *by: str, **labels: str) -> str:
        """Return a counter's growth per second, one series per job and further labels."""
        return total(self.rate(metric, **labels), *JOB, *by)

    def increases(self, metric: Metric, *by: str, window: str = RATE_INTERVAL, **labels: str) -> str:
        """Return a counter's growth over a window, one series per job and further labels."""
        return total(self.increase(metric, window, **labels), *JOB, *by)

    def quantile(self, share: float, metric: Metric, *by: str, window: str = RATE_INTERVAL, **labels: str) -> str:
        """Return a quantile of a histogram over a window, by the given labels."""
        buckets = self.buckets(metric, *by, window=window, **labels)
        return f"histogram_quantile({share:g}, {buckets})"

    def buckets(self, metric: Metric, *by: str, window: str = RATE_INTERVAL, **labels: str) -> str:
        """Return the rate per second of each bucket of a histogram, for percentiles and heat maps."""
        selected = self._select(_histogram(metric), f"{metric.name}_bucket", labels)
        return total(f"rate({selected}[{window}])", "le", *by)

    def mean(self, metric: Metric, *by: str, window: str = RATE_INTERVAL, **labels: str) -> str:
        """Return the mean of a histogram's values over a window, by the given labels."""
        sums, counts = (self._select(_histogram(metric), f"{metric.name}_{part}", labels) for part in ("sum", "count"))
        return f"{total(f'rate({sums}[{window}])', *by)} / {total(f'rate({counts}[{window}])', *by)}"

    def count_rate(self, metric: Metric, **labels: str) -> str:
        """Return the number of a histogram's values per second."""
        return f"rate({self._select(_histogram(metric), f'{metric.name}_count', labels)}[{RATE_INTERVAL}])"

    def seen(self, metric: Metric, window: str = RATE_INTERVAL, **labels: str) -> str:
        """Return the number of a histogram's values over a window."""
        return f"increase({self._select(_histogram(metric), f'{metric.name}_count', labels)}[{window}])"

    def _select(self, metric: Metric, name: str, labels: dict[str, str]) -> str:
        chosen = [_matcher(metric, label, value) for label, value in labels.items()]
        return f"{name}{{{','.join((*self.matchers, *chosen))}}}"


FLEET: Final = SeriesScope(('cluster=~"$cluster"', 'namespace=~"$namespace"'))
"""All jobs of the namespaces."""
JOBS: Final = SeriesScope((*FLEET.matchers, 'rlhf_job=~"$job"'))
"""The chosen jobs."""
WORKERS: Final = SeriesScope((*JOBS.matchers, 'worker=~"$worker"'))
"""The chosen workers of the chosen jobs."""
OPERATORS: Final = SeriesScope(('cluster=~"$cluster"', 'rlhf_job=""'))
"""Series without a job, such as the operator's own."""


def labels_of(metric: Metric) -> frozenset[str]:
    """Return the labels that a metric's series may have after a scrape."""
    return frozenset((*metric.label_names, *SCRAPED, *(("le",) if metric.kind is MetricKind.HISTOGRAM else ())))


def total(expression: str, *by: str) -> str:
    """Return a sum, by the given labels; without labels, one number."""
    return _aggregate("sum", expression, by)


def highest(expression: str, *by: str) -> str:
    """Return a maximum, by the given labels."""
    return _aggregate("max", expression, by)


def lowest(expression: str, *by: str) -> str:
    """Return a minimum, by the given labels."""
    return _aggregate("min", expression, by)


def average(expression: str, *by: str) -> str:
    """Return a mean, by the given labels."""
    return _aggregate("avg", expression, by)


def number_of(expression: str, *by: str) -> str:
    """Return the number of series, by the given labels."""
    return _aggregate("count", expression, by)


def top(size: int, expression: str) -> str:
    """Return the `size` series with the largest values."""
    return f"topk({size}, {expression})"


def bottom(size: int, expression: str) -> str:
    """Return the `size` series with the smallest values."""
    return f"bottomk({size}, {expression})"


def or_zero(expression: str, *labels: str) -> str:
    """Return an expression that is 0 if the given one has no series; not for measurements.

    The zero series has the given labels, each with the value "none".
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
    """Return `name="value"`; a value with prefix ~ is a pattern of alternatives, with ! or !~ an exclusion.

    Raises ValueError for a label or a value that the metric does not have.
    """
    label_values = {label.name: label.values for label in metric.labels}
    if name not in label_values and not (name in SCRAPED and metric.servers != (Server.OPERATOR,)) and name != POD:
        raise ValueError(f"{metric.name} has no label {name}: {', '.join(labels_of(metric))}")
    sign, text = next((op, value.removeprefix(mark)) for mark, op in _MARKS.items() if value.startswith(mark))
    strange = [
        item
        for item in text.split("|")
        if "$" not in item and label_values.get(name) and item not in label_values[name]
    ]
    if strange:
        raise ValueError(f"{metric.name}: {name} is never {', '.join(strange)}: {', '.join(label_values[name])}")
    return f'{name}{sign}"{text}"'
