"""The table of kinds: group, version and plural under which the API server serves each.

A kind is named as in manifests (`Pod`); for gangs and queues its apiVersion precedes it
(`scheduling.k8s.io/v1alpha2/PodGroup`).
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from rlhf_common import names


class Resource(NamedTuple):
    """Group, version and plural of a kind."""

    group: str
    """API group; empty for the core group."""
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """Return the apiVersion of its manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def prefix(self) -> str:
        """Return the URL path of its group and version."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"


ResourceTable = Mapping[str, Resource]
"""Kind -> its resource."""

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
"""Namespaced kinds that every cluster with RLHFJobs serves."""


def table_kind(table: ResourceTable, manifest: Mapping[str, Any]) -> str:
    """Return the table's key for the kind of a manifest, with the apiVersion as prefix if the table has that."""
    qualified = f"{manifest.get('apiVersion', '')}/{manifest['kind']}"
    return qualified if qualified in table else str(manifest["kind"])
