"""Intentional replacement of pods: the failure policy restarts their group, or their template has changed.

Rule: pure and level-triggered. A restart replaces all pods of the group at once; a changed template replaces ready
generation and inference pods without training ranks one at a time.
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
"""Time after a pod's creation from which a reading counts as one of this pod, not of its predecessor."""
LOOK_AGAIN_SECONDS: Final = 9.0
"""Least seconds until a group that waits for a newer reading is checked again."""
ONE_BY_ONE: Final = frozenset({Group.GENERATION, Group.INFERENCE})
"""Groups whose ready pods are replaced one at a time for a changed template, unless they have the training ranks."""
NONE_MESSAGE: Final = "no pod is being replaced on purpose"
KEPT_MESSAGE: Final = (
    "the coordinator keeps the settings of its start: without spec.checkpoints it would start from the beginning. "
    "Suspend the job and resume it to apply the new settings"
)


@dataclass(frozen=True)
class DesiredVersions:
    """The versions from which the pods of a job should be created."""

    epochs: Mapping[Group, int]
    """Restarts of each group by the failure policy, with those from now on."""
    hashes: Mapping[Group, str]
    """Hashes of templates and settings; if empty, pods are not compared."""
    one_by_one: frozenset[Group] = ONE_BY_ONE
    """The groups of ONE_BY_ONE without training ranks."""
    keeps_coordinator: bool = False
    """Whether a coordinator that has run is not replaced for a change, because the journal is in its pod."""

    def of_earlier_epoch(self, pod: ObservedPod) -> bool:
        """Return whether its group has restarted since it was created."""
        return pod.epoch < self.epochs.get(pod.group, 0)

    def outdated(self, pod: ObservedPod) -> bool:
        """Return whether its template has changed and it is to be replaced."""
        return self._differs(pod) and not self._is_needed(pod)

    def keeps(self, pod: ObservedPod) -> bool:
        """Return whether its template has changed but it is not to be replaced."""
        return self._differs(pod) and self._is_needed(pod)

    def _differs(self, pod: ObservedPod) -> bool:
        wanted = self.hashes.get(pod.group, "")
        return bool(wanted and pod.template_hash) and pod.template_hash != wanted

    def _is_needed(self, pod: ObservedPod) -> bool:
        """Return whether its deletion would lose the journal, which a coordinator that never ran does not have."""
        return self.keeps_coordinator and pod.group == Group.COORDINATOR and pod.began is not None


def desired_versions(
    job: RLHFJob,
    sizes: Mapping[Group, int],
    status: Mapping[str, Any],
    restarted: Collection[str],
    hashes: Mapping[Group, str],
) -> DesiredVersions:
    """Return the versions from which the pods of a job should be created.

    `restarted`: groups that restart from now on. `hashes`: group -> hash of its template; empty if pods are not
    compared.
    """
    stored_epochs = {str(group["name"]): int(group.get("epoch") or 0) for group in status.get("groups") or []}
    epochs = {group: stored_epochs.get(group, 0) + (group in restarted) for group in sizes}
    one_by_one = ONE_BY_ONE - {job.spec.rank_group}
    return DesiredVersions(epochs, hashes, one_by_one, keeps_coordinator=job.spec.checkpoints is None)


def replaced_pods(
    versions: DesiredVersions,
    sizes: Mapping[Group, int],
    pods: Iterable[ObservedPod],
    reading: CoordinatorReading | None,
    now: datetime,
) -> list[ObservedPod]:
    """Return the pods to delete now in order to create them again."""
    within = [pod for pod in pods if pod.index < sizes.get(pod.group, 0)]
    replaced = [pod for pod in within if pod.active and versions.of_earlier_epoch(pod)]
    # The coordinator needs the ranks for its checkpoint, so they stay until an outdated one is gone.
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
    """Return the seconds until a newer reading may let a rollout continue; an unchanged one causes no reconcile.

    None: no group waits for one.
    """
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
    """Return the condition Restarting; None if it stays unchanged.

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
    """Return the next pods of a one-by-one rollout: those that are not ready, else the last one if the group works."""
    outdated = [pod for pod in ours if pod.active and versions.outdated(pod)]
    broken = [pod for pod in outdated if not pod.ready]
    if broken or not outdated:
        return broken
    whole = _all_work(ours, size, reading)
    if reading is not None:
        whole = whole and reading.at >= _settled(ours, now)
    return [max(outdated, key=lambda pod: pod.index)] if whole else []


def _all_work(ours: Sequence[ObservedPod], size: int, reading: CoordinatorReading | None) -> bool:
    """Return whether every pod of a group is ready and, if the coordinator is read, works according to it."""
    ready = len(ours) == size and all(pod.active and pod.ready for pod in ours)
    return ready and (reading is None or reading.working.get(ours[0].group, 0) >= size)


def _settled(ours: Sequence[ObservedPod], now: datetime) -> datetime:
    """Return when a reading counts as one of the newest pod of a group."""
    newest = max((pod.created for pod in ours if pod.created is not None), default=now)
    return newest + SETTLED_AFTER


def _rollout_message(
    versions: DesiredVersions, groups: Sequence[Mapping[str, Any]], pods: Collection[ObservedPod]
) -> str:
    """Return the state of the rollout of templates and settings; empty if no pod is outdated."""
    messages = []
    for group in groups:
        ours = [pod for pod in pods if pod.group == group["name"]]
        outdated = [pod for pod in ours if versions.outdated(pod)]
        if not outdated:
            continue
        if group["name"] == Group.COORDINATOR:
            messages.append(
                "the coordinator has previous settings or templates: it saves a checkpoint and starts again"
            )
            continue
        new = [pod.name for pod in ours if not versions.outdated(pod) and not (pod.active and pod.ready)]
        waits = f", and {new[0]} has to be up before the next" if new and group["name"] in versions.one_by_one else ""
        messages.append(f"{len(outdated)} of {group['desired']} {group['name']} pods have the previous template{waits}")
    return "; ".join(messages)
