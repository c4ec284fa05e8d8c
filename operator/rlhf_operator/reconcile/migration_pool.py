"""The migration pool for Kubernetes: `status.migrationPool`, a label on its pods, events when it comes and goes.

Rule: pure. The coordinator moves samples in milliseconds and this is a slow picture of it: labels and status change at
most every PROGRESS_SECONDS, events come at most once in EVENT_EVERY, and nothing in the job waits for any of them. A
reading that is old says nothing about who is in the pool now, so labels then stay as they are.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_operator.reconcile.conditions import rfc3339
from rlhf_operator.reconcile.observed_job import CoordinatorReading
from rlhf_operator.reconcile.observed_pod import ObservedPod, time_of
from rlhf_operator.reconcile.reconcile_plan import JobEvent, PoolLabel

Json = dict[str, Any]

EVENT_INTERVAL: Final = timedelta(seconds=60)
"""Between two events: a pool forms once an iteration, and iterations may be short."""
NAMED: Final = 64
"""Workers that the status names; a bigger pool is found by the label."""
SHOWN: Final = 3
"""Workers that an event names."""


def pooled(
    reading: CoordinatorReading, generation: int, before: Mapping[str, Any], now: datetime
) -> tuple[Json, tuple[JobEvent, ...]]:
    """`status.migrationPool`, and what is to be said about it; `before` is the whole status."""
    known = before.get("migrationPool") or {}
    workers = sorted(reading.pool)
    found: Json = {
        "replicas": len(workers),
        "generationReplicas": generation,
        "threshold": reading.threshold,
        "released": reading.released,
        "summary": f"{len(workers)}/{generation}",
        "workers": workers[:NAMED],
    }
    last = known.get("lastEventTime")
    said = time_of(last)
    turned = bool(workers) != bool(known.get("replicas"))
    if not turned or (said is not None and now - said < EVENT_INTERVAL):
        return found | ({"lastEventTime": last} if last else {}), ()
    return found | {"lastEventTime": rfc3339(now)}, (_event(workers, reading),)


def _event(workers: list[str], reading: CoordinatorReading) -> JobEvent:
    if not workers:
        return JobEvent("PoolDissolved", f"iteration {reading.iteration + 1}: no worker keeps the long tail any more")
    more = f" and {len(workers) - SHOWN} more" if len(workers) > SHOWN else ""
    scoring = f"; {reading.released} released workers score" if reading.released else ""
    text = f"iteration {reading.iteration + 1}: the long tail is with {', '.join(workers[:SHOWN])}{more}{scoring}"
    return JobEvent("PoolFormed", text)


def labels(job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading) -> tuple[PoolLabel, ...]:
    """Pods whose label is to be set or taken away."""
    members = {f"{job.name}-{worker}" for worker in reading.pool}
    return tuple(
        PoolLabel(pod.name, pod.uid, pod.name in members)
        for pod in sorted(pods, key=lambda each: each.name)
        if pod.active and pod.pooled != (pod.name in members)
    )
