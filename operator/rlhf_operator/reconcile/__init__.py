"""Reconcile: decides what to do for one job from its observed state. Pure, level-triggered, idempotent."""

from rlhf_operator.reconcile.observed.observed_job import CoordinatorReading, ObservedJob
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod
from rlhf_operator.reconcile.observed.pod_parsing import pod_of
from rlhf_operator.reconcile.reconcile import reconcile
from rlhf_operator.reconcile.reconcile_plan import JobEvent, PodDeletion, PoolLabel, ReconcilePlan

__all__ = [
    "CoordinatorReading",
    "JobEvent",
    "ObservedJob",
    "ObservedPod",
    "PodDeletion",
    "PoolLabel",
    "ReconcilePlan",
    "pod_of",
    "reconcile",
]
