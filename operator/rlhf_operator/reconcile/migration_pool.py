"""The migration pool in Kubernetes: `status.migrationPool`, a label on its pods, and events when it forms or dissolves.

Rule: pure. There is at most one event per EVENT_INTERVAL.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_operator.reconcile.observed.observed_job import CoordinatorReading
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod
from rlhf_operator.reconcile.reconcile_plan import JobEvent, PoolLabel
from rlhf_operator.reconcile.timestamps import rfc3339, time_of

Json = dict[str, Any]

EVENT_INTERVAL: Final = timedelta(seconds=60)
"""Least time between two events."""
NAMED: Final = 64
"""Most workers that the status names."""
SHOWN: Final = 3
"""Most workers that an event names."""


def pool_status(
    reading: CoordinatorReading, generation: int, status: Mapping[str, Any], now: datetime
) -> tuple[Json, tuple[JobEvent, ...]]:
    """Return `status.migrationPool` and the events about it.

    `generation`: generation workers that the job should have. `status`: the whole stored status.
    """
    stored = status.get("migrationPool") or {}
    workers = sorted(reading.pool)
    pool: Json = {
        "replicas": len(workers),
        "generationReplicas": generation,
        "threshold": reading.threshold,
        "released": reading.released,
        "summary": f"{len(workers)}/{generation}",
        "workers": workers[:NAMED],
    }
    last = stored.get("lastEventTime")
    last_event = time_of(last)
    changed = bool(workers) != bool(stored.get("replicas"))
    if not changed or (last_event is not None and now - last_event < EVENT_INTERVAL):
        return pool | ({"lastEventTime": last} if last else {}), ()
    return pool | {"lastEventTime": rfc3339(now)}, (_event(workers, reading),)


def pool_labels(job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading) -> tuple[PoolLabel, ...]:
    """Return the pods whose label changes."""
    members = {f"{job.name}-{worker}" for worker in reading.pool}
    return tuple(
        PoolLabel(pod.name, pod.uid, pod.name in members)
        for pod in sorted(pods, key=lambda pod: pod.name)
        if pod.active and pod.pooled != (pod.name in members)
    )


def _event(workers: list[str], reading: CoordinatorReading) -> JobEvent:
    if not workers:
        return JobEvent("PoolDissolved", f"iteration {reading.iteration}: no worker decodes the long tail any more")
    more = f" and {len(workers) - SHOWN} more" if len(workers) > SHOWN else ""
    scoring = f"; {reading.released} released workers score" if reading.released else ""
    text = f"iteration {reading.iteration}: the long tail is decoded by {', '.join(workers[:SHOWN])}{more}{scoring}"
    return JobEvent("PoolFormed", text)
