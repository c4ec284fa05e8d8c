"""The interface of a backend: the objects that make a gang, and what a pod carries to be one of it.

Rule: pure. A pod that is made later, for another size or in place of one that was lost, joins the gang that is there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf_api.conditions import PlannedReason
from rlhf_api.job import RLHFJob
from rlhf_api.names import Group

Json = dict[str, Any]


class GangBackend(Protocol):
    """One way to place a job's pods together."""

    @property
    def mode(self) -> str:
        """Its name in spec.scheduling.gang.mode."""

    @property
    def fixed(self) -> bool:
        """Its objects can not be changed: another one takes their place when no pod is left."""

    def objects(self, job: RLHFJob, pods: Mapping[Group, Json]) -> list[Json]:
        """What is applied before the pods; `pods`: one of each group, as the job's are made."""

    def join(self, job: RLHFJob, pod: Json) -> Json:
        """The pod as one of the gang; the argument is not changed."""


@dataclass(frozen=True)
class GangChoice:
    """Which backend places a job, or why none can."""

    backend: GangBackend | None = None
    problem: str = ""
    """Why the job can not be placed as it asks, and what would help; empty when it can."""
    reason: PlannedReason = PlannedReason.NOT_SERVED
    note: str = ""
    """What the user should know of a choice that was made for him."""


def with_scheduler(pod: Json, name: str | None) -> Json:
    """The pod, given to that scheduler."""
    return {**pod, "spec": {**pod["spec"], "schedulerName": name}} if name else pod


def labelled(pod: Json, labels: dict[str, str], annotations: dict[str, str] | None = None) -> Json:
    """The pod with more labels and annotations."""
    meta = {**pod["metadata"], "labels": {**pod["metadata"].get("labels", {}), **labels}}
    if annotations:
        meta["annotations"] = {**pod["metadata"].get("annotations", {}), **annotations}
    return {**pod, "metadata": meta}
