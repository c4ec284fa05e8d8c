"""Pods -> processes of this machine: the same command and environment contract, loopback addresses, local paths.

Rule: only what differs between a cluster and one machine is rewritten: host names, ports, mounted paths, devices. What
has no meaning here (sidecars, init containers, volumes, resources, security context) is left out. Pure.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlhf_api import names
from rlhf_api.document import read
from rlhf_api.names import Env, Group
from rlhf_cli.local.devices import DeviceDemand, DeviceShare
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.ports import LOOPBACK
from rlhf_cli.local.run_folder import RunPaths
from rlhf_operator.manifests import RenderedObjects
from rlhf_operator.manifests.paths import JOB_KEY
from rlhf_operator.manifests.pods import CONTAINER, GPU_RESOURCE

Json = dict[str, Any]

_NOT_HERE: Final = frozenset(
    {
        "HOME",
        "PYTHONUNBUFFERED",
        "PYTHONDONTWRITEBYTECODE",
        Env.LOG_FORMAT.value,
        Env.METRICS.value,
        Env.TERMINATION_MESSAGE.value,
        Env.GRACE.value,
        Env.AWAIT_WORKERS.value,
    }
)
"""Pod variables that have another good value on this machine: the caller's."""


@dataclass(frozen=True)
class LocalProcess:
    """One process of the job."""

    name: str
    group: Group
    command: tuple[str, ...]
    env: dict[str, str]
    """Beside the caller's environment, which it overrides."""
    folder: Path
    """Working directory."""
    log: Path
    cores: frozenset[int] | None = None
    port: int = 0
    """Port of its own gRPC server."""
    device: str = "cpu"
    """For people: `cpu`, or `cuda:2,3` in the machine's numbering."""
    endpoint: str = ""
    """host:port at which it says whether it lives; empty: nobody asks."""


def device_demands(objects: RenderedObjects) -> list[DeviceDemand]:
    """What the pods need of a machine, in their order."""
    found = []
    for pod in objects.pods:
        container = _container(pod)
        gpus = int(container["resources"].get("limits", {}).get(GPU_RESOURCE, 0))
        threads = int(_environment(container, {}).get(Env.THREADS, "1"))
        found.append(DeviceDemand(_name(pod), _group(pod), threads, gpus))
    return found


def processes(
    objects: RenderedObjects,
    paths: RunPaths,
    shares: Mapping[str, DeviceShare],
    ports: Iterator[int],
    caller: Mapping[str, str],
) -> list[LocalProcess]:
    """One process a pod, the coordinator first. `ports` gives free ports (the first becomes the coordinator's).

    `caller` is the environment of the command, for variables a template takes from Secrets or fields of a cluster.
    """
    coordinator = f"{LOOPBACK}:{next(ports)}"
    patience = str(read(job_file_content(objects).decode()).data["spec"]["runPolicy"]["startTimeoutSeconds"])
    found = []
    for pod in objects.pods:
        process = _process(pod, paths, shares[_name(pod)], coordinator, ports, caller)
        if process.group is not Group.COORDINATOR:
            # In a cluster a coordinator may wait for its node, and the operator sees why; here it is there or never.
            process.env[Env.START_TIMEOUT] = patience
        found.append(process)
    return found


def job_file_content(objects: RenderedObjects) -> bytes:
    """The resolved job, as the ConfigMap holds it for the coordinator's pod."""
    (found,) = (each for each in objects.supporting if each["kind"] == "ConfigMap")
    return str(found["data"][JOB_KEY]).encode()


def _process(
    pod: Json, paths: RunPaths, share: DeviceShare, coordinator: str, ports: Iterator[int], caller: Mapping[str, str]
) -> LocalProcess:
    container, group, name = _container(pod), _group(pod), _name(pod)
    address = coordinator if group is Group.COORDINATOR else f"{LOOPBACK}:{next(ports)}"
    env = {key: value for key, value in _environment(container, caller).items() if key not in _NOT_HERE}
    local = {
        Env.JOB_FILE: str(paths.job_file),
        Env.RUN_DIR: str(paths.run_dir),
        Env.COORDINATOR: coordinator,
        Env.LISTEN: address,
        Env.ADVERTISE: address,
        Env.RENDEZVOUS: LOOPBACK,
        Env.CERTIFICATES: str(paths.certificates),
    }
    env.update({key.value: value for key, value in local.items() if key.value in env})
    env.update(_bytecode(caller))
    env[Env.METRICS] = f"{LOOPBACK}:{next(ports)}"
    if share.gpus or env.get(Env.DEVICE) == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    return LocalProcess(
        name=name,
        group=group,
        command=(sys.executable, *container["command"][1:]),
        env=env,
        folder=paths.base,
        log=paths.log(name),
        cores=share.cores,
        port=int(address.rpartition(":")[2]),
        device=f"cuda:{','.join(share.gpus)}" if share.gpus else "cpu",
        endpoint=env[Env.METRICS],
    )


def _bytecode(caller: Mapping[str, str]) -> dict[str, str]:
    """A caller that wants no bytecode beside its sources gets it elsewhere: an image has it compiled, but here every
    start of every worker would compile all of torch and transformers, ten seconds of CPU time each."""
    if not caller.get("PYTHONDONTWRITEBYTECODE") or "HOME" not in caller:
        return {}
    cache = Path(caller.get("XDG_CACHE_HOME") or Path(caller["HOME"]) / ".cache")
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache / "rlhf-operator" / "bytecode")}


def _environment(container: Json, caller: Mapping[str, str]) -> dict[str, str]:
    env = {}
    for variable in container["env"]:
        name = variable["name"]
        if "valueFrom" not in variable:
            env[name] = str(variable.get("value", ""))
        elif name in caller:
            env[name] = caller[name]
        elif caller:
            source = variable["valueFrom"].get("secretKeyRef")
            what = f"key {source['key']} of Secret {source['name']}" if source else "valueFrom"
            raise RunError(f"env {name}: {what} needs a cluster; set {name} in the environment instead")
    return env


def _container(pod: Json) -> Json:
    found: Sequence[Json] = pod["spec"]["containers"]
    return next(container for container in found if container["name"] == CONTAINER)


def _group(pod: Json) -> Group:
    return Group(pod["metadata"]["labels"][names.LABEL_GROUP])


def _name(pod: Json) -> str:
    group = _group(pod)
    if group is Group.COORDINATOR:
        return group.value
    return names.worker_name(group, int(pod["metadata"]["labels"][names.LABEL_INDEX]))
