"""What the cluster holds of the revision that a job runs by, before anybody has judged it: `revisions` does.

Rule: data only; whoever may write ConfigMaps may have written it.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rlhf_operator.manifests.mount_paths import JOB_KEY, REVISION_KEY


@dataclass(frozen=True)
class StoredRevision:
    """What the cluster holds of the revision of a job, compressed: every job has one, and most are read once."""

    packed: bytes = b""

    @classmethod
    def of(cls, data: Mapping[str, str]) -> Self:
        """Return the data of the job's ConfigMap as far as it is of the revision."""
        ours = {key: data[key] for key in (JOB_KEY, REVISION_KEY) if key in data}
        return cls(zlib.compress(json.dumps(ours).encode()))

    @property
    def data(self) -> dict[str, str]:
        """Return what the ConfigMap holds."""
        data: dict[str, str] = json.loads(zlib.decompress(self.packed)) if self.packed else {}
        return data
