"""Compares the metrics that a process serves with the catalogue."""

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rlhf_common.metrics.catalogue import BY_NAME, served_by
from rlhf_common.metrics.metric import Metric, MetricKind, Server


def metric_of_series(name: str) -> Metric | None:
    """Return the metric of a series name such as `..._bucket`; None for a foreign one."""
    for ending in ("", "_bucket", "_sum", "_count"):
        metric = BY_NAME.get(name.removesuffix(ending)) if name.endswith(ending) else None
        if metric is not None and name in metric.sample_names:
            return metric
    return None


def scraped(registry: CollectorRegistry) -> list[Sample]:
    """Return all samples of a page, as read by a scraper that asks for OpenMetrics."""
    page = generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    families = text_string_to_metric_families(page)  # type: ignore[no-untyped-call]
    return [sample for family in families for sample in family.samples]


def check_catalogue(registry: CollectorRegistry, server: Server) -> None:
    """Fail unless the families are those of the catalogue, and every series has the declared labels and values."""
    families = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    assert families == {metric.name for metric in served_by(server)}
    series = set()
    for sample in scraped(registry):
        metric = metric_of_series(sample.name)
        assert metric is not None, sample.name
        names = set(sample.labels) - ({"le"} if metric.kind is MetricKind.HISTOGRAM else set())
        assert names == set(metric.label_names), sample
        for label in metric.labels:
            assert not label.values or sample.labels[label.name] in label.values, sample
        place = (sample.name, *sorted(sample.labels.items()))
        assert place not in series, f"twice: {sample}"
        series.add(place)


def never_absent(registry: CollectorRegistry, server: Server) -> None:
    """Fail if a metric that always has a series has none."""
    present = {metric_of_series(sample.name) for sample in scraped(registry)}
    missing = [metric.name for metric in served_by(server) if not metric.absent and metric not in present]
    assert missing == []


def value(registry: CollectorRegistry, series: str, /, **labels: str) -> float:
    """Return the sum of the samples of a name with these labels; there must be at least one."""
    found = [s.value for s in scraped(registry) if s.name == series and labels.items() <= s.labels.items()]
    assert found, f"no series {series}{labels}"
    return sum(found)
