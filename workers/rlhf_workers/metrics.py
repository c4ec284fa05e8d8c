"""Prometheus endpoint of one worker: what the heartbeat says, as series.

Rule: values are read when scraped, from the same counters as the heartbeat; nothing is counted twice.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlhf_api.endpoint import Application
from rlhf_api.names import METRICS_PREFIX
from rlhf_workers.compute import Compute
from rlhf_workers.outbox import SessionOutbox


class WorkerCollector(Collector):
    """Series of one worker, labelled with its name."""

    def __init__(self, worker: str, outbox: SessionOutbox, compute: Compute) -> None:
        self._worker = worker
        self._outbox = outbox
        self._compute = compute

    def collect(self) -> Iterator[Metric]:
        """Yield one family per series of the heartbeat, and the weight version by model role."""
        snapshot = self._compute.snapshot
        counters = {
            "worker_tokens": ("Tokens decoded, scored or trained.", self._outbox.tokens),
            "worker_busy_seconds": ("Time the compute thread worked.", self._compute.busy_seconds()),
        }
        gauges = {
            "worker_active_samples": ("Samples held by the roles.", snapshot.active),
            "worker_queued_samples": ("Samples in commands not yet obeyed.", self._compute.queued_samples()),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(METRICS_PREFIX + name, text, labels=["worker"])
            counter.add_metric([self._worker], value)
            yield counter
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(METRICS_PREFIX + name, text, labels=["worker"])
            gauge.add_metric([self._worker], value)
            yield gauge
        text = "Weight version held, by model role."
        versions = GaugeMetricFamily(METRICS_PREFIX + "worker_weight_version", text, labels=["worker", "model"])
        for model, version in snapshot.versions.items():
            versions.add_metric([self._worker, model], version)
        yield versions


def metrics_of(worker: str, outbox: SessionOutbox, compute: Compute) -> Application:
    """Return what an endpoint serves as the metrics of a worker."""
    registry = CollectorRegistry()
    registry.register(WorkerCollector(worker, outbox, compute))
    application: Application = make_wsgi_app(registry)
    return application
