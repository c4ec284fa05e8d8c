"""Pods that are replaced on purpose: the failure policy restarts their group, or their template is another one by now.

Rule: pure and level-triggered. A pod carries the epoch of its group and the fingerprint of the template it was made
from; one that differs from what is wanted goes, and is made again as wanted when its name is free. A restart by the
failure policy takes all pods of the group at once. A changed template is rolled so that the job goes on: generation and
inference one pod at a time (samples move to others), and no further while the last one is not up; pods with training
ranks as a whole, for a group that misses one begins anew anyway, after the coordinator, which saves a checkpoint when
it is asked to end. The coordinator is also replaced when settings change that it reads when it starts. Without
spec.checkpoints its journal would be lost with it, so then it stays, and says so, and ranks train the journaled batches
again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.conditions import ConditionType, RestartingReason
from rlhf_api.job import RLHFJob
from rlhf_api.names import Group
from rlhf_operator.reconcile.conditions import Conditions
from rlhf_operator.reconcile.observed_job import CoordinatorReading
from rlhf_operator.reconcile.observed_pod import ObservedPod

SETTLED: Final = timedelta(seconds=5)
"""A reading taken this long after a pod was made no longer counts the one before it."""
ONE_BY_ONE: Final = frozenset({Group.GENERATION, Group.INFERENCE})
"""Those that hold no training rank."""
NONE_TOLD: Final = "no pod is being replaced on purpose"
KEPT_TOLD: Final = (
    "the coordinator goes on with the settings it started with: without spec.checkpoints it would begin anew. "
    "Suspend the job and resume it if it shall"
)


@dataclass(frozen=True)
class DesiredVersions:
    """What the pods of a job should be made from."""

    epochs: Mapping[Group, int]
    marks: Mapping[Group, str]
    """Fingerprints of templates and settings; empty: those of pods are not compared."""
    one_by_one: frozenset[Group] = ONE_BY_ONE
    """Groups whose pods are replaced one after another."""
    keeps_coordinator: bool = False
    """It is not replaced for a change: the journal lies in its pod."""

    def old(self, pod: ObservedPod) -> bool:
        """Its group is restarted, and it is one of those before."""
        return pod.epoch < self.epochs.get(pod.group, 0)

    def outdated(self, pod: ObservedPod) -> bool:
        """Its template is another one by now, and it is to be replaced."""
        return self.differs(pod) and not (self.keeps_coordinator and pod.group == Group.COORDINATOR)

    def differs(self, pod: ObservedPod) -> bool:
        """Its template is another one by now."""
        mark = self.marks.get(pod.group, "")
        return bool(mark and pod.template) and pod.template != mark


def wanted(
    job: RLHFJob,
    sizes: Mapping[Group, int],
    before: Mapping[str, Any],
    scopes: Iterable[str],
    marks: Mapping[Group, str],
) -> DesiredVersions:
    """`scopes`: groups that are restarted from now on; `marks`: of templates that are good to make pods from."""
    known = {str(each["name"]): int(each.get("epoch") or 0) for each in before.get("groups") or []}
    restarted = set(scopes)
    epochs = {group: known.get(group, 0) + (group in restarted) for group in sizes}
    one_by_one = ONE_BY_ONE - {job.spec.rank_group}
    return DesiredVersions(epochs, marks, one_by_one, keeps_coordinator=job.spec.checkpoints is None)


def leaving(
    wanted: DesiredVersions,
    sizes: Mapping[Group, int],
    pods: Iterable[ObservedPod],
    reading: CoordinatorReading | None,
    now: datetime,
) -> list[ObservedPod]:
    """Pods to delete now."""
    listed = [pod for pod in pods if pod.index < sizes.get(pod.group, 0)]
    found = [pod for pod in listed if pod.active and wanted.old(pod)]
    for group in sizes:
        ours = [pod for pod in listed if pod.group == group]
        if group in wanted.one_by_one:
            found += _next(wanted, ours, sizes[group], reading, now)
        elif group is Group.COORDINATOR or not _checkpoint_first(wanted, listed):
            found += [pod for pod in ours if pod.active and wanted.outdated(pod)]
    return list({pod.name: pod for pod in found}.values())


def _checkpoint_first(wanted: DesiredVersions, pods: Sequence[ObservedPod]) -> bool:
    """The coordinator has not ended yet; it needs the ranks for its checkpoint."""
    return any(pod.group == Group.COORDINATOR and wanted.outdated(pod) for pod in pods)


def _next(
    wanted: DesiredVersions, ours: Sequence[ObservedPod], size: int, reading: CoordinatorReading | None, now: datetime
) -> list[ObservedPod]:
    """Of a group that rolls one by one: those that are not up anyway, else the last, once all the others work."""
    outdated = [pod for pod in ours if pod.active and wanted.outdated(pod)]
    broken = [pod for pod in outdated if not pod.ready]
    if broken or not outdated:
        return broken
    group = outdated[0].group
    whole = len(ours) == size and all(pod.active and pod.ready for pod in ours)
    if reading is not None:
        newest = max((pod.created for pod in ours if pod.created is not None), default=now)
        whole = whole and reading.at >= newest + SETTLED and reading.working.get(group, 0) >= size
    return [max(outdated, key=lambda pod: pod.index)] if whole else []


def restarting(
    conditions: Conditions,
    wanted: DesiredVersions,
    groups: Sequence[Mapping[str, Any]],
    pods: Iterable[ObservedPod],
    scopes: Mapping[str, tuple[str, str]],
) -> None:
    """Sets Restarting; `groups` is `status.groups`, `scopes` what the failure policy restarts from now on."""
    listed = list(pods)
    kind, began = ConditionType.RESTARTING, conditions.holds(ConditionType.RESTARTING)
    if scopes:
        job = next((why for scope, why in scopes.values() if scope == "Job"), None)
        names = ", ".join(sorted(scopes))
        text = f"the whole job restarts: {job}" if job else f"{names} restarts: {next(iter(scopes.values()))[1]}"
        conditions.set(kind, True, RestartingReason.JOB if job else RestartingReason.GROUP, text)
        return
    rolling = _rolling(wanted, groups, listed)
    if rolling:
        conditions.set(kind, True, RestartingReason.ROLLING, rolling)
        return
    up = all(each["ready"] >= each["desired"] for each in groups)
    if began and (any(wanted.old(pod) for pod in listed) or not up):
        return  # it goes on, for the reason it began with
    kept = any(pod.group == Group.COORDINATOR and pod.active and wanted.differs(pod) for pod in listed)
    if kept:
        conditions.set(kind, False, RestartingReason.KEPT, KEPT_TOLD)
    else:
        conditions.set(kind, False, RestartingReason.NONE, NONE_TOLD)


def _rolling(wanted: DesiredVersions, groups: Sequence[Mapping[str, Any]], pods: Sequence[ObservedPod]) -> str:
    """What the roll of the templates waits for, in words; empty when every pod is made from the present ones."""
    told = []
    for each in groups:
        ours = [pod for pod in pods if pod.group == each["name"]]
        left = [pod for pod in ours if wanted.outdated(pod)]
        if not left:
            continue
        if each["name"] == Group.COORDINATOR:
            told.append("the coordinator has settings or templates from before: it saves a checkpoint and starts again")
            continue
        new = [pod.name for pod in ours if not wanted.outdated(pod) and not (pod.active and pod.ready)]
        waits = f", and {new[0]} has to be up before the next" if new and each["name"] in wanted.one_by_one else ""
        told.append(f"{len(left)} of {each['desired']} {each['name']} pods have the template from before{waits}")
    return "; ".join(told)
