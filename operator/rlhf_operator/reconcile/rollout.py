"""Pods that are replaced on purpose: the failure policy restarts their group, or their template is another one by now.

Rule: pure and level-triggered. A pod carries the epoch of its group and the hash of the template it was made from; one
that differs from what is wanted goes, and is made again as wanted when its name is free. A restart by the failure
policy takes all pods of the group at once. A changed template is rolled out so that the job goes on: generation and
inference one pod at a time (samples move to others), and no further while the last one is not up; pods with training
ranks as a whole, for a group that misses one begins anew anyway, after the coordinator, which saves a checkpoint when
it is asked to end. The coordinator is also replaced when settings change that it reads when it starts. Without
spec.checkpoints its journal would be lost with it, so then it stays, and says so, and ranks train the journaled batches
again.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common.conditions import ConditionType, RestartingReason
from rlhf_common.names import Group
from rlhf_operator.reconcile.conditions import ConditionUpdate, StoredConditions
from rlhf_operator.reconcile.failures.failure_counter import GroupRestart
from rlhf_operator.reconcile.observed.observed_job import CoordinatorReading
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod

SETTLED_AFTER: Final = timedelta(seconds=5)
"""A reading taken this long after a pod was made no longer counts the one before it."""
LOOK_AGAIN_SECONDS: Final = 9.0
"""Until a group that waits for a newer reading is looked at again; the operator reads as often."""
ONE_BY_ONE: Final = frozenset({Group.GENERATION, Group.INFERENCE})
"""Groups that hold no training rank."""
NONE_MESSAGE: Final = "no pod is being replaced on purpose"
KEPT_MESSAGE: Final = (
    "the coordinator goes on with the settings it started with: without spec.checkpoints it would begin anew. "
    "Suspend the job and resume it if it shall"
)


@dataclass(frozen=True)
class DesiredVersions:
    """What the pods of a job should be made from."""

    epochs: Mapping[Group, int]
    """Restarts of each group by the failure policy."""
    hashes: Mapping[Group, str]
    """Hashes of templates and settings; empty: those of pods are not compared."""
    one_by_one: frozenset[Group] = ONE_BY_ONE
    """Groups whose pods are replaced one after another."""
    keeps_coordinator: bool = False
    """It is not replaced for a change: the journal lies in its pod."""

    def of_earlier_epoch(self, pod: ObservedPod) -> bool:
        """Return whether its group is restarted, and it is one of those before."""
        return pod.epoch < self.epochs.get(pod.group, 0)

    def outdated(self, pod: ObservedPod) -> bool:
        """Return whether its template is another one by now, and it is to be replaced."""
        return self._differs(pod) and not self._is_needed(pod)

    def keeps(self, pod: ObservedPod) -> bool:
        """Return whether its template is another one by now, and it goes on all the same."""
        return self._differs(pod) and self._is_needed(pod)

    def _differs(self, pod: ObservedPod) -> bool:
        wanted = self.hashes.get(pod.group, "")
        return bool(wanted and pod.template_hash) and pod.template_hash != wanted

    def _is_needed(self, pod: ObservedPod) -> bool:
        """Return whether something is lost with it: nothing is with a coordinator that never ran."""
        return self.keeps_coordinator and pod.group == Group.COORDINATOR and pod.began is not None


def desired_versions(
    job: RLHFJob,
    sizes: Mapping[Group, int],
    status: Mapping[str, Any],
    restarted: Collection[str],
    hashes: Mapping[Group, str],
) -> DesiredVersions:
    """Return what the pods of a job should be made from.

    `restarted`: groups that are restarted from now on; `hashes`: of templates that are good to make pods from.
    """
    known = {str(group["name"]): int(group.get("epoch") or 0) for group in status.get("groups") or []}
    epochs = {group: known.get(group, 0) + (group in restarted) for group in sizes}
    one_by_one = ONE_BY_ONE - {job.spec.rank_group}
    return DesiredVersions(epochs, hashes, one_by_one, keeps_coordinator=job.spec.checkpoints is None)


def replaced_pods(
    versions: DesiredVersions,
    sizes: Mapping[Group, int],
    pods: Iterable[ObservedPod],
    reading: CoordinatorReading | None,
    now: datetime,
) -> list[ObservedPod]:
    """Return the pods to delete now because they are made anew."""
    within = [pod for pod in pods if pod.index < sizes.get(pod.group, 0)]
    replaced = [pod for pod in within if pod.active and versions.of_earlier_epoch(pod)]
    # The coordinator needs the ranks for its checkpoint, so they stay until it has ended.
    checkpoint_first = any(pod.group == Group.COORDINATOR and versions.outdated(pod) for pod in within)
    for group in sizes:
        ours = [pod for pod in within if pod.group == group]
        if group in versions.one_by_one:
            replaced += _next_of_rollout(versions, ours, sizes[group], reading, now)
        elif group is Group.COORDINATOR or not checkpoint_first:
            replaced += [pod for pod in ours if pod.active and versions.outdated(pod)]
    return list({pod.name: pod for pod in replaced}.values())


def requeue_after(
    versions: DesiredVersions,
    sizes: Mapping[Group, int],
    pods: Collection[ObservedPod],
    reading: CoordinatorReading | None,
    now: datetime,
) -> float | None:
    """Return the seconds until a reading may let a group roll on that says the same as the one before, and so starts no
    reconcile; None: no group waits for one."""
    if reading is None:
        return None
    left = []
    for group in versions.one_by_one:
        size = sizes.get(group, 0)
        ours = [pod for pod in pods if pod.group == group and pod.index < size]
        outdated = any(pod.active and versions.outdated(pod) for pod in ours)
        if outdated and _all_work(ours, size, reading) and reading.at < (settled := _settled(ours, now)):
            left.append(max((settled - now).total_seconds(), LOOK_AGAIN_SECONDS))
    return min(left, default=None)


def restarting_condition(
    stored: StoredConditions,
    versions: DesiredVersions,
    groups: Sequence[Mapping[str, Any]],
    pods: Collection[ObservedPod],
    restarts: Mapping[str, GroupRestart],
) -> ConditionUpdate | None:
    """Return the condition Restarting; None: it stays, for the reason it began with.

    `groups` is `status.groups`; `restarts`: group -> restart by the failure policy from now on.
    """
    kind = ConditionType.RESTARTING
    if restarts:
        job_wide = next((restart for restart in restarts.values() if restart.whole_job), None)
        if job_wide is not None:
            text = f"the whole job restarts: {job_wide.why}"
            return ConditionUpdate(kind, True, RestartingReason.JOB, text)
        text = f"{', '.join(sorted(restarts))} restarts: {next(iter(restarts.values())).why}"
        return ConditionUpdate(kind, True, RestartingReason.GROUP, text)
    if rolling := _rollout_message(versions, groups, pods):
        return ConditionUpdate(kind, True, RestartingReason.ROLLING, rolling)
    up = all(group["ready"] >= group["desired"] for group in groups)
    if stored.holds(kind) and (any(versions.of_earlier_epoch(pod) for pod in pods) or not up):
        return None
    if any(pod.active and versions.keeps(pod) for pod in pods):
        return ConditionUpdate(kind, False, RestartingReason.KEPT, KEPT_MESSAGE)
    return ConditionUpdate(kind, False, RestartingReason.NONE, NONE_MESSAGE)


def _next_of_rollout(
    versions: DesiredVersions,
    ours: Sequence[ObservedPod],
    size: int,
    reading: CoordinatorReading | None,
    now: datetime,
) -> list[ObservedPod]:
    """Return the next pods of a group that rolls one by one: those that are not up anyway, else the last one, once all
    the others work."""
    outdated = [pod for pod in ours if pod.active and versions.outdated(pod)]
    broken = [pod for pod in outdated if not pod.ready]
    if broken or not outdated:
        return broken
    whole = _all_work(ours, size, reading)
    if reading is not None:
        whole = whole and reading.at >= _settled(ours, now)
    return [max(outdated, key=lambda pod: pod.index)] if whole else []


def _all_work(ours: Sequence[ObservedPod], size: int, reading: CoordinatorReading | None) -> bool:
    """Return whether every pod of a group is ready, and works by the words of the coordinator if it is read."""
    ready = len(ours) == size and all(pod.active and pod.ready for pod in ours)
    return ready and (reading is None or reading.working.get(ours[0].group, 0) >= size)


def _settled(ours: Sequence[ObservedPod], now: datetime) -> datetime:
    """Return when the coordinator knows of the newest pod of a group: a reading from before means the one before it."""
    newest = max((pod.created for pod in ours if pod.created is not None), default=now)
    return newest + SETTLED_AFTER


def _rollout_message(
    versions: DesiredVersions, groups: Sequence[Mapping[str, Any]], pods: Collection[ObservedPod]
) -> str:
    """Return what the rollout of the templates waits for; empty when every pod is made from the present ones."""
    messages = []
    for group in groups:
        ours = [pod for pod in pods if pod.group == group["name"]]
        outdated = [pod for pod in ours if versions.outdated(pod)]
        if not outdated:
            continue
        if group["name"] == Group.COORDINATOR:
            messages.append(
                "the coordinator has settings or templates from before: it saves a checkpoint and starts again"
            )
            continue
        new = [pod.name for pod in ours if not versions.outdated(pod) and not (pod.active and pod.ready)]
        waits = f", and {new[0]} has to be up before the next" if new and group["name"] in versions.one_by_one else ""
        messages.append(
            f"{len(outdated)} of {group['desired']} {group['name']} pods have the template from before{waits}"
        )
    return "; ".join(messages)
