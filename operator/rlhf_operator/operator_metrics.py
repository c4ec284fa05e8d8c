"""Prometheus metrics of the operator; names and labels are part of its interface (docs/operations.md).

Rule: labels are bounded by what exists: the series of a job go when the job goes. Setting them is the only thing done
here; nothing reads them back.
"""

from collections import Counter as Tally
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rlhf_api.conditions import ConditionType
from rlhf_operator.job_metrics import CONDITION, PODS, POOL, RESTARTS, STREAMS, THRESHOLD, WANTED, JobSeries, Values
from rlhf_operator.reconcile import ObservedJob, ReconcilePlan
from rlhf_operator.reconcile.timestamps import time_of
from rlhf_operator.workqueue import QueueSnapshot

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LONG_SECONDS: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_CONDITIONS: Final = frozenset(item.value for item in ConditionType)
_RESIZED: Final = ("generation", "inference")
_PHASES: Final = ("Pending", "Running", "Succeeded", "Failed", "Unknown")


class OperatorMetrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = made = CollectorRegistry()
        self.reconciles = Histogram(
            "rlhf_operator_reconcile_duration_seconds",
            "Time of one reconcile.",
            ["result"],
            registry=made,
            buckets=_SECONDS,
        )
        self.errors = Counter(
            "rlhf_operator_reconcile_errors", "Reconciles that failed, by kind of error.", ["reason"], registry=made
        )
        self.depth = Gauge("rlhf_operator_workqueue_depth", "Jobs that wait for a reconcile.", registry=made)
        self.oldest = Gauge(
            "rlhf_operator_workqueue_oldest_age_seconds", "Time the longest-waiting job has waited.", registry=made
        )
        self.requests = Counter(
            "rlhf_operator_api_requests", "Requests to the API server.", ["verb", "resource", "code"], registry=made
        )
        self.watch = Gauge(
            "rlhf_operator_watch_last_event_timestamp_seconds", "When the last event came.", ["resource"], registry=made
        )
        self.watch_alive = Gauge(
            "rlhf_operator_watch_alive_timestamp_seconds",
            "When the API server last said something in a watch: an event or a bookmark, which come every minute.",
            ["resource"],
            registry=made,
        )
        self.relists = Counter(
            "rlhf_operator_watch_relists", "Listings of watches that could not go on.", ["resource"], registry=made
        )
        self.unreadable = Counter(
            "rlhf_operator_unreadable_objects",
            "Objects that could not be read, or not to the end, by kind.",
            ["kind"],
            registry=made,
        )
        self.leader = Gauge("rlhf_operator_leader", "1 while this process reconciles.", registry=made)
        self.jobs = JobSeries()
        made.register(self.jobs)
        self.resized = Histogram(
            "rlhf_pool_resize_duration_seconds",
            "From a change of size until all workers have joined or left.",
            registry=made,
            buckets=_LONG_SECONDS,
        )
        self.ready_after = Histogram(
            "rlhf_job_created_to_ready_seconds",
            "From a job's creation to its first Running condition.",
            registry=made,
            buckets=_LONG_SECONDS,
        )
        self.build = Gauge("rlhf_build_info", "Always 1; the label is the version.", ["version"], registry=made)
        self.build.labels(version("rlhf-operator")).set(1)

    def answered(self, verb: str, resource: str, code: int) -> None:
        """Count an answer of the API server; code 0 is none."""
        self.requests.labels(verb, resource, str(code)).inc()

    def queue(self, snapshot: QueueSnapshot) -> None:
        """Set the state of the work queue."""
        self.depth.set(snapshot.depth)
        self.oldest.set(snapshot.oldest_age_seconds)

    def see(self, job: Mapping[str, Any], observed: ObservedJob, plan: ReconcilePlan) -> None:
        """Set what a reconcile of a job saw and decided."""
        meta = job["metadata"]
        place = (str(meta["namespace"]), str(meta["name"]))
        before = job.get("status") or {}
        status = plan.status or before
        listed = (condition for condition in status.get("conditions") or [] if condition["type"] in _CONDITIONS)
        conditions: Values = {(str(item["type"]), str(item["status"])): 1.0 for item in listed}
        tally = Tally((pod.group, pod.phase if pod.phase in _PHASES else "Unknown") for pod in observed.pods.values())
        counted = status.get("restarts") or {}
        restarts: Values = {(item[:-1],): float(counted.get(item) or 0) for item in ("failures", "disruptions")}
        pods: Values = {labels: float(count) for labels, count in sorted(tally.items())}
        series: dict[str, Values] = {CONDITION: conditions, PODS: pods, RESTARTS: restarts}
        self.jobs.show("/".join(place), series | _sizes(observed, status))
        if plan.status is not None and (seconds := _resized(before, plan.status)) is not None:
            self.resized.observe(seconds)
        if plan.status is not None and _runs(plan.status) and not _ran(before):
            created = time_of(meta.get("creationTimestamp"))
            moment = next(
                condition for condition in plan.status["conditions"] if condition["type"] == ConditionType.RUNNING
            )
            became = time_of(moment["lastTransitionTime"])
            if created is not None and became is not None:
                self.ready_after.observe((became - created).total_seconds())

    def forget(self, key: str) -> None:
        """Drop the series of a job that is gone."""
        self.jobs.forget(key)


def _sizes(observed: ObservedJob, status: Mapping[str, Any]) -> dict[str, Values]:
    groups = status.get("groups") or []
    result: dict[str, Values] = {
        WANTED: {(str(group["name"]),): float(group["desired"]) for group in groups if group["name"] in _RESIZED}
    }
    if (reading := observed.reading) is not None:
        result[POOL] = {(): float(len(reading.pool))}
        result[THRESHOLD] = {(): float(reading.threshold)}
        result[STREAMS] = {(): float(reading.streams)}
    return result


def _resized(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """Seconds that a resize took which has just ended."""
    was, now = _resizing(before), _resizing(after)
    if was is None or now is None or (was["status"], now["status"]) != ("True", "False"):
        return None
    began, ended = time_of(was["lastTransitionTime"]), time_of(now["lastTransitionTime"])
    return None if began is None or ended is None else (ended - began).total_seconds()


def _resizing(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next(
        (condition for condition in status.get("conditions") or [] if condition["type"] == ConditionType.RESIZING), None
    )


def _runs(status: Mapping[str, Any]) -> bool:
    result = {condition["type"]: condition["status"] for condition in status.get("conditions") or []}
    return result.get(ConditionType.RUNNING) == "True"


def _ran(status: Mapping[str, Any]) -> bool:
    return _runs(status) or bool(status.get("progress"))
