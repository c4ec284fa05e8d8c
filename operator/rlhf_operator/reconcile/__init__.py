"""Reconcile: what is to be done for one job, given what was observed of it. Pure, level-triggered, idempotent."""

from rlhf_operator.reconcile.observed import Observed, Reading
from rlhf_operator.reconcile.plan import Deletion, Event, Plan, PoolLabel
from rlhf_operator.reconcile.pod import Pod, pod_of
from rlhf_operator.reconcile.reconcile import reconcile

__all__ = ["Deletion", "Event", "Observed", "Plan", "Pod", "PoolLabel", "Reading", "pod_of", "reconcile"]
