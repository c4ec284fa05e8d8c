"""Pod specs of every kind that quota depends on, and two independent counts of their requests."""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from hypothesis import strategies as st

from rlhf_operator.manifests.quantity import amount, written

Json = dict[str, Any]

AMOUNTS: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": ("0", "1m", "250m", "1", "1.5", "4"),
    "memory": ("1", "100M", "1Gi", "1500Mi", "1e9"),
    "ephemeral-storage": ("1Gi", "5G"),
    "nvidia.com/gpu": ("1", "2", "8"),
    "hugepages-2Mi": ("2Mi", "64Mi"),
}
"""Resource -> quantities to draw from."""
OVERCOMMITTED: Final = ("cpu", "memory", "ephemeral-storage")
"""Resources whose request may be smaller than their limit."""
RUNTIME_CLASS: Final = "sandboxed"
OVERHEAD: Final = {"cpu": "250m", "memory": "120Mi"}
"""Overhead that the runtime class adds to a pod."""
POD_LEVEL: Final = ("cpu", "memory", "hugepages-2Mi")
"""Resources that `spec.resources` of a pod may name."""


@st.composite
def _resources(draw: st.DrawFn, names: tuple[str, ...]) -> Json:
    """Draw requests and limits that the API server accepts."""
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    for name in draw(st.lists(st.sampled_from(names), unique=True, max_size=4)):
        low, high = sorted((draw(st.sampled_from(AMOUNTS[name])), draw(st.sampled_from(AMOUNTS[name]))), key=amount)
        sides = draw(st.sampled_from(["both", "limits"] + (["requests"] if name in OVERCOMMITTED else [])))
        if sides in ("both", "limits"):
            limits[name] = high
        if sides in ("both", "requests"):
            requests[name] = low if name in OVERCOMMITTED else high
    if "hugepages-2Mi" in limits and not {"cpu", "memory"} & (requests.keys() | limits.keys()):
        requests["memory"] = "1Gi"  # huge pages need cpu or memory
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


@st.composite
def _containers(draw: st.DrawFn, prefix: str, least: int, *, init: bool) -> list[Json]:
    containers = []
    for number in range(draw(st.integers(least, 3))):
        container: Json = {"name": f"{prefix}-{number}", "image": "unused"}
        if resources := draw(_resources(tuple(AMOUNTS))):
            container["resources"] = resources
        if init and draw(st.booleans()):
            container["restartPolicy"] = "Always"
        containers.append(container)
    return containers


@st.composite
def pod_specs(draw: st.DrawFn) -> Json:
    """Draw a pod spec with containers, init containers, sidecars, pod-level resources and overhead."""
    spec: Json = {"containers": draw(_containers("main", 1, init=False))}
    if init := draw(_containers("init", 0, init=True)):
        spec["initContainers"] = init
    if draw(st.booleans()):
        spec["resources"] = _large_enough(spec, draw(_resources(POD_LEVEL)))
    if draw(st.booleans()):
        spec |= {"runtimeClassName": RUNTIME_CLASS, "overhead": OVERHEAD}
    return spec


POD_SPECS: Final = pod_specs()


def _large_enough(spec: Json, resources: Json) -> Json:
    """Return pod-level resources that are not below those of the containers, which the API server would refuse."""
    least = most_at_once({key: value for key, value in spec.items() if key != "overhead"})
    for name, value in (pair for stage in _stages(spec, "limits") for pair in stage.items()):
        least[name] = max(least.get(name, Decimal(0)), value)
    raised: Json = {}
    for kind, quantities in resources.items():
        larger = {name: max(amount(value), least.get(name, Decimal(0))) for name, value in quantities.items()}
        raised[kind] = {name: written(value) for name, value in larger.items()}
    return raised


def _stages(spec: Json, kind: str) -> Iterator[dict[str, Decimal]]:
    """Yield the requests of each stage of a pod's life: while each init container runs, and after them all."""
    init = spec.get("initContainers") or []
    for number, container in enumerate(init):
        yield _sum([*(before for before in init[:number] if _sidecar(before)), container], kind)
    yield _sum([*(container for container in init if _sidecar(container)), *spec["containers"]], kind)


def _sidecar(container: Json) -> bool:
    return container.get("restartPolicy") == "Always"


def _sum(containers: list[Json], kind: str) -> dict[str, Decimal]:
    total: dict[str, Decimal] = {}
    for container in containers:
        resources = container.get("resources") or {}
        stated = dict(resources.get(kind) or {})
        if kind == "requests":
            stated = {**(resources.get("limits") or {}), **stated}
        for name, value in stated.items():
            total[name] = total.get(name, Decimal(0)) + amount(value)
    return total


def most_at_once(spec: Json) -> dict[str, Decimal]:
    """Return the largest requests of any stage, or the pod's own, with the overhead of its runtime."""
    most: dict[str, Decimal] = {}
    for stage in _stages(spec, "requests"):
        for name, value in stage.items():
            most[name] = max(most.get(name, Decimal(0)), value)
    stated = spec.get("resources") or {}
    for name, value in (stated.get("limits") or {}).items():
        if name not in most or name.startswith("hugepages-"):
            most[name] = amount(value)
    for name, value in (stated.get("requests") or {}).items():
        most[name] = amount(value)
    for name, value in (spec.get("overhead") or {}).items():
        most[name] = most.get(name, Decimal(0)) + amount(value)
    return most


def kueue_counts(spec: Json) -> dict[str, Decimal]:
    """Return Kueue's count for a pod set's template.

    Kueue uses a container's limits for missing requests, as the API server does for pods, but not the limits of the pod
    itself.
    """
    bare = {key: value for key, value in spec.items() if key != "resources"}
    if requests := (spec.get("resources") or {}).get("requests"):
        bare["resources"] = {"requests": requests}
    return most_at_once(bare)
