"""No gang: every pod is scheduled by itself, by whatever scheduler its template names. Rule: pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_api.job import RLHFJob
from rlhf_common.names import Group

Json = dict[str, Any]


@dataclass(frozen=True)
class NoGangBackend:
    """Pods as they are made, and no other object."""

    mode: str = "Disabled"
    makes_objects: bool = False
    immutable: bool = False

    def objects(self, job: RLHFJob, pods: Mapping[Group, Json]) -> list[Json]:
        """Return nothing."""
        return []

    def join(self, job: RLHFJob, pod: Json) -> Json:
        """Return the pod as it is."""
        return pod
