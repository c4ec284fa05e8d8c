"""What the cluster holds of the revision that a job runs by, before anybody has judged it: `revisions` does.

Rule: data only; whoever may write ConfigMaps may have written it.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from rlhf_api.names import ANNOTATION_TEMPLATE, Group
from rlhf_operator.manifests.mount_paths import JOB_KEY, REVISION_KEY
from rlhf_operator.manifests.pods import CONTAINER

Json = dict[str, Any]


@dataclass(frozen=True)
class RunningContainer:
    """What our container of a pod that runs was made with."""

    container: Json
    template_hash: str
    """Of the template that the pod was made from."""

    @property
    def image(self) -> str:
        """Return its image."""
        return str(self.container["image"])


def running_container(body: Mapping[str, Any]) -> RunningContainer | None:
    """Return our container from a pod's body as the API server has it; None when the pod has none."""
    annotations = body["metadata"].get("annotations") or {}
    for container in body["spec"]["containers"]:
        if container["name"] == CONTAINER:
            return RunningContainer(container, str(annotations.get(ANNOTATION_TEMPLATE) or ""))
    return None


@dataclass(frozen=True)
class StoredRevision:
    """What the cluster holds of the revision of a job, compressed: every job has one, and most are read once."""

    packed: bytes = b""
    running: Mapping[Group, RunningContainer] = field(default_factory=dict, hash=False)
    """A pod of each group, where there is a job with pods and no revision."""

    @classmethod
    def of(cls, data: Mapping[str, str], running: Mapping[Group, RunningContainer] | None = None) -> Self:
        """Return the data of the job's ConfigMap as far as it is of the revision."""
        ours = {key: data[key] for key in (JOB_KEY, REVISION_KEY) if key in data}
        return cls(zlib.compress(json.dumps(ours).encode()), running or {})

    @property
    def data(self) -> dict[str, str]:
        """Return what the ConfigMap holds."""
        data: dict[str, str] = json.loads(zlib.decompress(self.packed)) if self.packed else {}
        return data
