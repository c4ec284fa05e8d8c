"""Prometheus metrics of the operator, as declared in the catalogue (`rlhf_common.metrics`).

Rule: a job's series end with the job.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rlhf_common.conditions import ConditionType, RunningReason
from rlhf_common.metrics import operator, storage
from rlhf_common.metrics.exposition import family, registry_of
from rlhf_common.metrics.metric import Metric
from rlhf_operator.job_metrics import JobSeries
from rlhf_operator.job_series import JobPhase, own_values, phase_of, shared_values
from rlhf_operator.reconcile import ObservedJob, ReconcilePlan
from rlhf_operator.reconcile.timestamps import time_of
from rlhf_operator.reconcile_traces import ReconcileTraces
from rlhf_operator.workqueue import QueueSnapshot

_AT_WORK: Final = frozenset({RunningReason.RUNNING, RunningReason.RECOVERING})
"""Reasons of Running of a job whose resize can be finished."""


class OperatorMetrics:
    """All metrics, in a separate registry."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self._clock = clock
        self._phases: dict[str, JobPhase] = {}
        self.jobs = JobSeries()
        self.traces = ReconcileTraces()
        """Traces of this process; `operate` replaces these closed ones."""
        self._own = registry_of([_TraceSpans(self)])
        self.registry = CollectorRegistry()
        """Registry with all metrics, for the Prometheus client library."""
        self.registry.register(self._own)
        self.registry.register(self.jobs)
        self.reconciles = self._histogram(operator.RECONCILE_SECONDS)
        self.errors = self._counter(operator.RECONCILE_ERRORS)
        self.depth = self._gauge(operator.QUEUE_DEPTH)
        self.oldest = self._gauge(operator.QUEUE_OLDEST)
        self.requests = self._counter(operator.API_REQUESTS)
        self.watch = self._gauge(operator.WATCH_EVENT)
        self.watch_alive = self._gauge(operator.WATCH_ALIVE)
        self.relists = self._counter(operator.WATCH_RELISTS)
        self.unreadable = self._counter(operator.UNREADABLE)
        self.leader = self._gauge(operator.LEADER)
        self.resized = self._histogram(operator.RESIZE_SECONDS)
        self.ready_after = self._histogram(operator.READY_SECONDS)

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name.removesuffix("_total"), metric.meaning, metric.label_names, registry=self._own)

    def _gauge(self, metric: Metric) -> Gauge:
        return Gauge(metric.name, metric.meaning, metric.label_names, registry=self._own)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(metric.name, metric.meaning, metric.label_names, registry=self._own, buckets=metric.buckets)

    def page(self) -> bytes:
        """Return all metrics as text; may run in another thread than the rest."""
        return generate_latest(self._own) + self.jobs.page()

    def answered(self, verb: str, resource: str, code: int) -> None:
        """Count an answer of the API server; code 0 means no answer."""
        self.requests.labels(verb, resource, str(code)).inc()

    def queue(self, snapshot: QueueSnapshot) -> None:
        """Set the state of the work queue."""
        self.depth.set(snapshot.depth)
        self.oldest.set(snapshot.oldest_age_seconds)

    def see(self, job: Mapping[str, Any], observed: ObservedJob, plan: ReconcilePlan) -> None:
        """Set the values that a reconcile of a job observed and decided."""
        meta = job["metadata"]
        key = f"{meta['namespace']}/{meta['name']}"
        before = job.get("status") or {}
        status = plan.status or before
        phase = self._phases[key] = phase_of(self._phases.get(key), status, self._clock())
        self.jobs.show(key, shared_values(job, observed, status, phase), own_values(job, status, phase))
        if plan.status is None:
            return
        if (seconds := _resized(before, plan.status)) is not None:
            self.resized.observe(seconds)
        if (seconds := _ready_after(meta, before, plan.status)) is not None:
            self.ready_after.observe(seconds)

    def forget(self, key: str) -> None:
        """Drop the series of a deleted job."""
        self.jobs.forget(key)
        self._phases.pop(key, None)


class _TraceSpans(Collector):
    """Results of spans, read on each scrape."""

    def __init__(self, metrics: OperatorMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        """Yield the metric with one series per outcome."""
        yield family(storage.TRACE_SPANS, {(outcome,): n for outcome, n in self._metrics.traces.counts().items()})


def _ready_after(meta: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """Return the seconds from a job's creation until it runs; None unless it has just begun to run, with no iteration
    trained.
    """
    running = _condition(after, ConditionType.RUNNING)
    if running is None or running["status"] != "True" or (before.get("progress") or {}).get("iteration"):
        return None
    earlier = _condition(before, ConditionType.RUNNING)
    if earlier is not None and earlier["status"] == "True":
        return None
    created, became = time_of(meta.get("creationTimestamp")), time_of(running["lastTransitionTime"])
    return None if created is None or became is None else (became - created).total_seconds()


def _resized(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """Return the seconds for which Resizing was True, if it has just become False; else None.

    None also for a job that has stopped or starts again.
    """
    running = _condition(after, ConditionType.RUNNING)
    if running is None or running["reason"] not in _AT_WORK:
        return None
    was, now = _condition(before, ConditionType.RESIZING), _condition(after, ConditionType.RESIZING)
    if was is None or now is None or (was["status"], now["status"]) != ("True", "False"):
        return None
    began, ended = time_of(was["lastTransitionTime"]), time_of(now["lastTransitionTime"])
    return None if began is None or ended is None else (ended - began).total_seconds()


def _condition(status: Mapping[str, Any], kind: ConditionType) -> Mapping[str, Any] | None:
    return next((condition for condition in status.get("conditions") or [] if condition["type"] == kind), None)
