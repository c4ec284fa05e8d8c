"""The input of the steps of reconcile: the job, its observed state, and values derived from both.

Rule: frozen and pure; properties are derived from the fields.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Self

from rlhf_api.job import RLHFJob
from rlhf_common.conditions import ConditionType
from rlhf_common.names import Group
from rlhf_operator.manifests import identity
from rlhf_operator.manifests.rendering import group_sizes
from rlhf_operator.reconcile import forced_deletion, rollout
from rlhf_operator.reconcile.conditions import StoredConditions
from rlhf_operator.reconcile.failures import hung_workers, start_back_off
from rlhf_operator.reconcile.failures.start_back_off import StartBackOff
from rlhf_operator.reconcile.gang_admission import GangAdmission
from rlhf_operator.reconcile.observed.observed_job import CoordinatorReading, ObservedJob
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod
from rlhf_operator.reconcile.revisions.pinning import PinnedJob
from rlhf_operator.reconcile.rollout import DesiredVersions
from rlhf_operator.reconcile.timestamps import time_of


@dataclass(frozen=True)
class ReconcileContext:
    """One job at one moment."""

    stored: Mapping[str, Any]
    """The RLHFJob as stored in the API server."""
    job: RLHFJob
    pinned: PinnedJob
    """The job with its revision, and the problems of its manifest."""
    gang: GangAdmission
    observed: ObservedJob
    now: datetime

    @classmethod
    def for_job(
        cls, stored: Mapping[str, Any], pinned: PinnedJob, gang: GangAdmission, observed: ObservedJob, now: datetime
    ) -> Self:
        """Return the context of a job whose manifest can be read."""
        assert pinned.job is not None
        return cls(stored, pinned.job, pinned, gang, observed, now)

    @property
    def status(self) -> Mapping[str, Any]:
        """Return the stored status."""
        status: Mapping[str, Any] = self.stored.get("status") or {}
        return status

    @cached_property
    def conditions(self) -> StoredConditions:
        """Return the stored conditions."""
        return StoredConditions.from_status(self.status)

    @property
    def finished(self) -> bool:
        """Return whether the job is complete or has failed permanently."""
        return self.conditions.holds(ConditionType.COMPLETE) or self.conditions.holds(ConditionType.FAILED)

    @property
    def pods(self) -> Collection[ObservedPod]:
        """Return the pods of the job."""
        return self.observed.pods.values()

    @cached_property
    def pods_with_ended(self) -> Collection[ObservedPod]:
        """Return the existing and the ended pods of the job, each once: a pod may end during the observation and be in
        both.
        """
        return {pod.uid: pod for pod in (*self.observed.ended, *self.pods)}.values()

    @property
    def reading(self) -> CoordinatorReading | None:
        """Return the latest reading of the coordinator; None without one, or if the one that answered is gone."""
        return self.observed.current_reading

    @property
    def coordinator_runs(self) -> bool:
        """Return whether the coordinator's pod runs, so that it can be read and resized."""
        coordinator = self.observed.pods.get(identity.pod_name(self.job, Group.COORDINATOR, 0))
        return coordinator is not None and coordinator.phase == "Running" and not coordinator.over

    @property
    def generation(self) -> int | None:
        """Return metadata.generation."""
        generation: int | None = self.stored["metadata"].get("generation")
        return generation

    @cached_property
    def started(self) -> datetime | None:
        """Return status.startTime."""
        return time_of(self.status.get("startTime"))

    @cached_property
    def sizes(self) -> Mapping[Group, int]:
        """Return the number of pods that each group should have: what the job wants, within the queue's limits.

        A job that awaits the plan of its sizes has a coordinator, and keeps other pods.
        """
        if self.job.spec.awaits_plan:
            sizes = {Group.COORDINATOR: 1}
            for pod in self.pods:
                sizes[pod.group] = max(sizes.get(pod.group, 0), pod.index + 1)
            return sizes
        limits = self.gang.limits
        return {group: min(count, limits.get(group, count)) for group, count in group_sizes(self.job).items()}

    @cached_property
    def force_after(self) -> timedelta | None:
        """Return the time beyond its grace after which a coordinator on a lost node is force-deleted; None: never."""
        return forced_deletion.force_after(self.job, self.status)

    @cached_property
    def start_back_off(self) -> StartBackOff | None:
        """Return the stored or new back-off of a job that could not start; None if there is none or it runs again."""
        back_off, generation = start_back_off.stored_back_off(self.status), int(self.generation or 0)
        if not self.pinned.planned or self._stopped_by_others:
            return back_off
        return start_back_off.decided(self.job, self.observed.pods, self.reading, back_off, generation, self.now)

    @cached_property
    def backs_off(self) -> bool:
        """Return whether the job could not start, releases its resources, and waits."""
        back_off = self.start_back_off
        return back_off is not None and back_off.holds(int(self.generation or 0), self.now)

    @property
    def leaves_queue(self) -> str:
        """Return why the job releases its resources and leaves its queue; empty if it does not."""
        if self.job.spec.suspend:
            return "the job is suspended"
        return "the job could not begin and waits before it tries again" if self.backs_off else ""

    @property
    def stopping(self) -> bool:
        """Return whether no pod should remain: because of the user, the queue, or failed starts."""
        return self._stopped_by_others or self.backs_off

    @property
    def _stopped_by_others(self) -> bool:
        return self.job.spec.suspend or self.gang.closed

    @cached_property
    def lost(self) -> Mapping[str, str]:
        """Return uid -> reason for pods whose process the coordinator has lost and that are replaced now."""
        if self.stopping or not self.pinned.planned:
            return {}
        return hung_workers.lost(self.job, self.pods, self.reading, self.now)

    @property
    def write_refused(self) -> bool:
        """Return whether an object was not written the last time, or its name is occupied."""
        return bool(self.observed.refusals or self.observed.occupied)

    def versions(self, restarted: Collection[str] = ()) -> DesiredVersions:
        """Return the versions from which pods should be created; `restarted`: groups that restart from now on."""
        hashes = self.pinned.hashes if self.pinned.planned else {}
        return rollout.desired_versions(self.job, self.sizes, self.status, restarted, hashes)
