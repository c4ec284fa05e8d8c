"""Computes the requests of one pod as the scheduler does. Rule: pure.

Source: PodRequests of k8s.io/component-helpers, and the API server's defaults.
"""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Final

from rlhf_operator.manifests.quantity import amount

Json = dict[str, Any]
Amounts = dict[str, Decimal]

_POD_LEVEL: Final = ("cpu", "memory")
_HUGE_PAGES: Final = "hugepages-"
"""Prefix of resources that a pod may also request itself."""


def pod_requests(spec: Mapping[str, Any]) -> Amounts:
    """Return the requests of a pod with this spec, by resource."""
    total = _container_requests(spec)
    total |= {name: amount(value) for name, value in pod_level_requests(spec).items()}
    return _added(total, _amounts((spec.get("overhead") or {}).items()))


def pod_level_requests(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requests of the pod itself: cpu, memory and huge pages.

    Limits count where neither the pod nor a container has a request.
    """
    stated = spec.get("resources") or {}
    if not stated:
        return {}
    counted = _container_requests(spec)
    limits = {
        name: value
        for name, value in (stated.get("limits") or {}).items()
        if name not in counted or name.startswith(_HUGE_PAGES)
    }
    return {
        name: value
        for name, value in {**limits, **(stated.get("requests") or {})}.items()
        if name in _POD_LEVEL or name.startswith(_HUGE_PAGES)
    }


def is_sidecar(container: Mapping[str, Any]) -> bool:
    """Return whether an init container keeps running beside the containers that start after it."""
    return container.get("restartPolicy") == "Always"


def _container_requests(spec: Mapping[str, Any]) -> Amounts:
    """Return the largest requests of the containers at any one time."""
    total: Amounts = {}
    for container in spec["containers"]:
        total = _added(total, _requests(container))
    sidecars: Amounts = {}
    most: Amounts = {}
    for container in spec.get("initContainers") or []:
        beside = _added(sidecars, _requests(container))
        most = _larger(most, beside)
        if is_sidecar(container):
            sidecars = beside
    return _larger(_added(total, sidecars), most)


def _requests(container: Mapping[str, Any]) -> Amounts:
    resources = container.get("resources") or {}
    return _amounts(((resources.get("limits") or {}) | (resources.get("requests") or {})).items())


def _amounts(quantities: Iterable[tuple[str, Any]]) -> Amounts:
    return {name: amount(value) for name, value in quantities}


def _added(first: Amounts, second: Amounts) -> Amounts:
    return {name: first.get(name, Decimal(0)) + second.get(name, Decimal(0)) for name in first | second}


def _larger(first: Amounts, second: Amounts) -> Amounts:
    return {name: max(first.get(name, Decimal(0)), second.get(name, Decimal(0))) for name in first | second}
