"""No gang: each pod is scheduled alone, by the scheduler that its template names. Rule: pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_api.job import RLHFJob
from rlhf_common.names import Group

Json = dict[str, Any]


@dataclass(frozen=True)
class NoGangBackend:
    """Leaves pods unchanged and adds no object."""

    mode: str = "Disabled"
    makes_objects: bool = False
    immutable: bool = False

    def objects(self, job: RLHFJob, pods: Mapping[Group, Json]) -> list[Json]:
        """Return an empty list."""
        return []

    def join(self, job: RLHFJob, pod: Json) -> Json:
        """Return the pod unchanged."""
        return pod
