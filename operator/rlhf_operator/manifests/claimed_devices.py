"""GPUs that a template claims (resource.k8s.io) instead of the resource nvidia.com/gpu. Rule: pure.

With the variable RLHF_DEVICE, such as cuda:0, a template says that the claim provides the GPUs; without it, the claim
may be for a network card.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlhf_api.problems import Problem, Severity
from rlhf_common.names import Env
from rlhf_operator.manifests.quantity import amount
from rlhf_operator.manifests.rank_ports import SEPARATOR, joined

Json = Mapping[str, Any]

VARIABLE: Final = Env.DEVICE.value


def gives_gpus(container: Json) -> bool:
    """Return whether a claim of our container provides the GPUs."""
    named = any(variable.get("name") == VARIABLE for variable in container.get("env") or [])
    return named and bool((container.get("resources") or {}).get("claims"))


def problems_of(container: Json, path: str, group: str, gpus: int) -> Iterator[Problem]:
    """Yield the requests of a container that conflict with its claim, and warn if the group is counted as one without
    GPUs.
    """
    resources = container.get("resources") or {}
    for kind in ("limits", "requests"):
        for name, value in (resources.get(kind) or {}).items():
            if name.endswith(("/gpu", "/tpu")) and amount(value):
                yield Problem(
                    f"{path}.resources.{kind}.{name}", value, "a claim gives the GPUs already: remove one of both"
                )
    if not gpus:
        message = (
            "the group counts as one on CPU, for training.precision Auto, engine Auto and plans, while a claim gives "
            f"its processes GPUs: set {group}.gpusPerReplica, which asks for no nvidia.com/gpu beside the claim"
        )
        yield Problem(f"{path}.resources.claims", resources["claims"], message, severity=Severity.WARNING)


def problems_of_variable(variable: Json, path: str, devices: str) -> Iterator[Problem]:
    """Yield the problems of the devices that a template names. `devices`: the operator's value of the variable."""
    processes = devices.count(SEPARATOR) + 1
    right = joined([f"cuda:{index}" for index in range(processes)])
    if variable.get("value") not in ({right, "cuda"} if processes == 1 else {right}):
        yield Problem(path, variable.get("value"), f"must be {right}, as a pod sees its own devices alone")


def without_gpus(resources: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the resources of a container without the extended resource `name`."""
    kinds = {kind: {key: value for key, value in amounts.items() if key != name} for kind, amounts in resources.items()}
    return {kind: amounts for kind, amounts in kinds.items() if amounts}
