"""The revision's part of the data of a job's ConfigMap, not verified.

Rule: data only; anybody who may write ConfigMaps may have written it.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rlhf_operator.manifests.mount_paths import JOB_KEY, REVISION_KEY


@dataclass(frozen=True)
class StoredRevision:
    """The stored revision of a job, compressed."""

    packed: bytes = b""

    @classmethod
    def from_data(cls, data: Mapping[str, str]) -> Self:
        """Return the revision's part of the data of the job's ConfigMap."""
        ours = {key: data[key] for key in (JOB_KEY, REVISION_KEY) if key in data}
        return cls(zlib.compress(json.dumps(ours).encode()))

    @property
    def data(self) -> dict[str, str]:
        """Return the revision's part of the data of the ConfigMap; empty if nothing is stored."""
        data: dict[str, str] = json.loads(zlib.decompress(self.packed)) if self.packed else {}
        return data
