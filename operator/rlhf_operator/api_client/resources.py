"""Where the API server serves each kind. Data alone.

A kind is named as in manifests, `Pod`; one that several groups serve has its apiVersion in front,
`scheduling.k8s.io/v1alpha2/PodGroup`. Whoever speaks further kinds adds them to the table that a client is given.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from rlhf_common import names


class Resource(NamedTuple):
    """Where a kind is served."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """Return the apiVersion of its manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def prefix(self) -> str:
        """Return the path of its group and version."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"


ResourceTable = Mapping[str, Resource]
"""Kind -> where it is served."""

CORE_RESOURCES: Final[ResourceTable] = {
    "Pod": Resource("", "v1", "pods"),
    "Service": Resource("", "v1", "services"),
    "ConfigMap": Resource("", "v1", "configmaps"),
    "Secret": Resource("", "v1", "secrets"),
    "NetworkPolicy": Resource("networking.k8s.io", "v1", "networkpolicies"),
    "Event": Resource("events.k8s.io", "v1", "events"),
    "Lease": Resource("coordination.k8s.io", "v1", "leases"),
    names.KIND: Resource(names.GROUP, names.VERSION, names.PLURAL),
}
"""The kinds that every cluster with RLHFJobs serves; all have a namespace."""


def table_kind(table: ResourceTable, manifest: Mapping[str, Any]) -> str:
    """Return what the table calls the kind of a manifest: with the apiVersion in front where it has that."""
    qualified = f"{manifest.get('apiVersion', '')}/{manifest['kind']}"
    return qualified if qualified in table else str(manifest["kind"])
