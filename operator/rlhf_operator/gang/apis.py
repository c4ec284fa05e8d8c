"""The APIs of schedulers and queues that the operator supports, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rlhf_operator.api_client.resources import Resource, ResourceTable, table_kind

NATIVE, KUEUE, VOLCANO, COSCHEDULING = "Native", "Kueue", "Volcano", "Coscheduling"
MODES: Final = (NATIVE, KUEUE, VOLCANO, COSCHEDULING)

APIS: Final[Mapping[str, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    # Newest first; `native` has the form of the objects.
    NATIVE: (
        ("scheduling.k8s.io/v1beta1", ("Workload", "PodGroup")),
        ("scheduling.k8s.io/v1alpha2", ("Workload", "PodGroup")),
        ("scheduling.k8s.io/v1alpha1", ("Workload",)),
    ),
    KUEUE: (("kueue.x-k8s.io/v1beta2", ("Workload",)), ("kueue.x-k8s.io/v1beta1", ("Workload",))),
    VOLCANO: (("scheduling.volcano.sh/v1beta1", ("PodGroup",)),),
    COSCHEDULING: (("scheduling.x-k8s.io/v1alpha1", ("PodGroup",)),),
}
"""Backend -> (apiVersion, kinds that the operator writes in it), preferred version first."""
PRIORITY_CLASS: Final = "scheduling.k8s.io/v1/PriorityClass"
_READ: Final = ("ResourceFlavor", "WorkloadPriorityClass")
"""Kinds of Kueue without a namespace, which are read by name."""
_PLURALS: Final = {
    "Workload": "workloads",
    "PodGroup": "podgroups",
    "ResourceFlavor": "resourceflavors",
    "WorkloadPriorityClass": "workloadpriorityclasses",
}


@dataclass(frozen=True)
class ServedApis:
    """The APIs above that the cluster serves and that this operator may use."""

    apis: frozenset[str] = field(default_factory=frozenset)
    """apiVersions of backends that are not off, if the cluster serves all kinds that the operator writes in them."""
    off: frozenset[str] = field(default_factory=frozenset)
    """Backends that the administrator of the operator has switched off."""
    ignores_labels: bool = False
    """Whether a job starts without a queue if it asks for one that cannot be used."""

    def version(self, mode: str) -> str | None:
        """Return the apiVersion to use with a backend; None if it cannot be used."""
        result = (version for version, _ in APIS[mode] if version in self.apis)
        return None if mode in self.off else next(result, None)

    def usable(self) -> dict[str, str]:
        """Return backend -> apiVersion for the backends that can be used."""
        return {mode: version for mode in MODES if (version := self.version(mode)) is not None}

    def watched(self) -> dict[str, Resource]:
        """Return kind -> resource for the kinds that the operator writes in the versions it uses."""
        spoken = self.usable().values()
        return {
            f"{version}/{kind}": RESOURCES[f"{version}/{kind}"]
            for versions in APIS.values()
            for version, kinds in versions
            if version in spoken
            for kind in kinds
        }


def kind_of(manifest: Mapping[str, Any]) -> str:
    """Return a manifest's kind, with its apiVersion as prefix if it is a kind of RESOURCES."""
    return table_kind(RESOURCES, manifest)


def _resource(api_version: str, plural: str) -> Resource:
    group, _, version = api_version.partition("/")
    return Resource(group, version, plural)


RESOURCES: Final[ResourceTable] = {
    f"{version}/{kind}": _resource(version, _PLURALS[kind])
    for mode, versions in APIS.items()
    for version, kinds in versions
    for kind in (*kinds, *(_READ if mode == KUEUE else ()))
} | {PRIORITY_CLASS: _resource("scheduling.k8s.io/v1", "priorityclasses")}
"""Kind -> its resource; _READ and PriorityClass have no namespace."""
