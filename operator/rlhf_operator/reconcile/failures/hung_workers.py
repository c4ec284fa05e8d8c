"""Workers that the coordinator has lost although their pods are well: which of them are replaced.

A process that hangs, or whose network is cut, looks well to its kubelet. Its coordinator has not heard of it for
spec.runPolicy.workerTimeoutSeconds, has given its samples to others, and waits for it where it holds a training rank.
Rule: pure. A pod is replaced only when the process that was lost still runs in it (one that started since has to load
first), when the node has had time to be noticed as lost, and when at least half of the workers that the coordinator
knows still speak with it: if more are lost at once, it is the coordinator's own network that is cut, and no other pod
would help. A coordinator that the operator cannot read loses nobody.
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
"""A node that does not answer is noticed after 40 to 50 s; its pods are not ready then, and not ours to end."""
READ_LATELY: Final = timedelta(seconds=30)
"""A reading comes every nine seconds; an older one says nothing about now."""
GRACE_SECONDS: Final = 30
"""Of a pod that is deleted because its process hangs: it saves nothing any more, whatever it was given to."""


def lost(
    job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading | None, now: datetime
) -> dict[str, str]:
    """Return uid -> why, in words, of each pod to replace now."""
    listed = list(pods)
    if reading is None or now - reading.at > READ_LATELY or _coordinator_is_cut_off(job, reading):
        return {}
    patience = _patience(job)
    return {
        pod.uid: f"lost: its coordinator has not heard of it for {(now - since).total_seconds():.0f} s, though it runs"
        for pod, since in _silent(job, listed, reading)
        if now - since >= patience
    }


def next_lost(
    job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading | None, now: datetime
) -> float | None:
    """Return the seconds until `lost` may return another one; None: it will not."""
    left = (
        [(since + _patience(job) - now).total_seconds() for _, since in _silent(job, pods, reading)] if reading else []
    )
    return min((seconds for seconds in left if seconds > 0), default=None)


def silence_message(job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading | None) -> str:
    """Return what is said of the workers that are silent and not replaced yet; empty when there are none."""
    silent = [pod.name for pod, _ in _silent(job, pods, reading)] if reading is not None else []
    if reading is None or not silent:
        return ""
    if _coordinator_is_cut_off(job, reading):
        known = len(reading.silent) + reading.streams
        return (
            f"the coordinator has lost {len(reading.silent)} of {known} workers at once, so its own network is more "
            "likely cut than theirs: none is replaced. `kubectl delete pod` replaces one"
        )
    more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
    seconds = _patience(job).total_seconds()
    return f"the coordinator has lost {silent[0]}{more}, whose pod is ready: it is replaced after {seconds:.0f} s"


def _patience(job: RLHFJob) -> timedelta:
    return timedelta(seconds=job.spec.run_policy.worker_timeout_seconds) + NODE_NOTICED


def _coordinator_is_cut_off(job: RLHFJob, reading: CoordinatorReading) -> bool:
    silent, speaking = len(reading.silent), reading.streams
    if job.spec.training.ranks_per_pod > 1:
        # One lost pod silences all its ranks at once, so pods are compared, and of those that speak there are no more
        # than those that are not silent.
        silent = len(pods_of_workers(job.spec, reading.silent))
        speaking = min(speaking, sum(count for _, count, _ in workers(job)) - silent)
    return silent > speaking


def _since(job: RLHFJob, pod: ObservedPod, reading: CoordinatorReading) -> datetime | None:
    """Return when the first of a pod's workers that are silent was last heard; None where none is silent."""
    names = workers_of(job.spec, pod.group, pod.index)
    return min((reading.silent[name] for name in names if name in reading.silent), default=None)


def _silent(
    job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading
) -> list[tuple[ObservedPod, datetime]]:
    """Return the pods that look well and whose process is silent, with the time when it was last heard."""
    silent = []
    for pod in pods:
        since = _since(job, pod, reading)
        well = pod.active and pod.ready and pod.phase == "Running"
        if since is not None and well and pod.running is not None and pod.running < since:
            silent.append((pod, since))
    return sorted(silent, key=lambda item: item[0].name)
