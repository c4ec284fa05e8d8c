"""Decides which workers to replace that the coordinator has lost although their pods are ready.

Rule: pure. Without a recent reading, none is replaced, nor if more are silent than connected, when the coordinator's
own network has probably failed.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from rlhf_api.job import RLHFJob
from rlhf_api.rank_pods import pods_of_workers, workers_of
from rlhf_operator.manifests.rendering import workers
from rlhf_operator.reconcile.observed.observed_job import CoordinatorReading
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod

NODE_NOTICED: Final = timedelta(seconds=60)
"""Time after which the pods of a lost node are expected not to be ready; such pods are handled elsewhere."""
READ_LATELY: Final = timedelta(seconds=30)
"""Largest age of a reading."""
GRACE_SECONDS: Final = 30
"""Grace period in seconds of a pod that is deleted because its process hangs."""


def lost(
    job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading | None, now: datetime
) -> dict[str, str]:
    """Return uid -> reason for each pod to replace now."""
    listed = list(pods)
    if reading is None or now - reading.at > READ_LATELY or _coordinator_is_cut_off(job, reading):
        return {}
    patience = _patience(job)
    return {
        pod.uid: f"lost: no heartbeat reached its coordinator for {(now - since).total_seconds():.0f} s, though it runs"
        for pod, since in _silent(job, listed, reading)
        if now - since >= patience
    }


def next_lost(
    job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading | None, now: datetime
) -> float | None:
    """Return the seconds until `lost` may return another pod; None if it will not."""
    left = (
        [(since + _patience(job) - now).total_seconds() for _, since in _silent(job, pods, reading)] if reading else []
    )
    return min((seconds for seconds in left if seconds > 0), default=None)


def silence_message(job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading | None) -> str:
    """Return the message about silent workers in healthy-looking pods; empty if there are none."""
    silent = [pod.name for pod, _ in _silent(job, pods, reading)] if reading is not None else []
    if reading is None or not silent:
        return ""
    if _coordinator_is_cut_off(job, reading):
        worker_count = len(reading.silent) + reading.streams
        return (
            f"the coordinator has lost {len(reading.silent)} of {worker_count} workers at once, so its own network is "
            "more likely cut than theirs: none is replaced. `kubectl delete pod` replaces one"
        )
    more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
    seconds = _patience(job).total_seconds()
    return f"the coordinator has lost {silent[0]}{more}, whose pod is ready: it is replaced after {seconds:.0f} s"


def _patience(job: RLHFJob) -> timedelta:
    return timedelta(seconds=job.spec.run_policy.worker_timeout_seconds) + NODE_NOTICED


def _coordinator_is_cut_off(job: RLHFJob, reading: CoordinatorReading) -> bool:
    silent, speaking = len(reading.silent), reading.streams
    if job.spec.training.ranks_per_pod > 1:
        # One lost pod silences all its ranks, so pods are compared. At most the pods that are not silent are connected.
        silent = len(pods_of_workers(job.spec, reading.silent))
        speaking = min(speaking, sum(count for _, count, _ in workers(job)) - silent)
    return silent > speaking


def _since(job: RLHFJob, pod: ObservedPod, reading: CoordinatorReading) -> datetime | None:
    """Return the time of the earliest last message of a pod's silent workers; None if none is silent."""
    names = workers_of(job.spec, pod.group, pod.index)
    return min((reading.silent[name] for name in names if name in reading.silent), default=None)


def _silent(
    job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading
) -> list[tuple[ObservedPod, datetime]]:
    """Return the healthy-looking pods with a silent process, with the time of its last message."""
    silent = []
    for pod in pods:
        since = _since(job, pod, reading)
        well = pod.active and pod.ready and pod.phase == "Running"
        if since is not None and well and pod.running is not None and pod.running < since:
            silent.append((pod, since))
    return sorted(silent, key=lambda item: item[0].name)
