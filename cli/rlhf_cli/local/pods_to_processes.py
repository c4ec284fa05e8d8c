"""Turn the pods of a job into processes of this machine, with the commands and most variables of the pods. Pure.

Rule: host names, ports, mounted paths and devices are rewritten. Sidecars, init containers and volumes are left out.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlhf_cli.local.devices import DeviceDemand, DeviceShare
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.ports import LOOPBACK, JobPorts
from rlhf_cli.local.run_folder import RunPaths
from rlhf_common import names
from rlhf_common.names import Env, Group
from rlhf_operator.manifests import RenderedObjects, engine_pods
from rlhf_operator.manifests.mount_paths import JOB_KEY
from rlhf_operator.manifests.pods import CONTAINER, GPU_RESOURCE
from rlhf_operator.manifests.rank_ports import joined

Json = dict[str, Any]

_LEFT_OUT: Final = frozenset(
    {
        "HOME",
        "PYTHONUNBUFFERED",
        "PYTHONDONTWRITEBYTECODE",
        Env.LOG_FORMAT.value,
        Env.METRICS.value,
        Env.TERMINATION_MESSAGE.value,
        Env.GRACE.value,
        Env.AWAIT_WORKERS.value,
        *engine_pods.CACHES,
        *engine_pods.OFFLINE,
    }
)
"""Variables of a pod whose values are not used on this machine; some are set anew."""


@dataclass(frozen=True)
class LocalProcess:
    """One process of the job."""

    name: str
    group: Group
    command: tuple[str, ...]
    env: dict[str, str]
    """Variables that are added to the caller's environment, or override it."""
    folder: Path
    """Working directory."""
    log: Path
    """File for its output."""
    cores: frozenset[int] | None = None
    """CPU cores to which it is pinned; None for any."""
    port: int = 0
    """Port of its gRPC server; with several ranks, that of the first one."""
    device: str = "cpu"
    """Device in displays: `cpu`, or `cuda:2,3` in the numbering of the machine."""
    endpoint: str = ""
    """host:port of its metrics and liveness; empty when it serves none."""


def device_demands(objects: RenderedObjects) -> list[DeviceDemand]:
    """Return the devices that each pod needs of a machine, in the order of the pods."""
    split = json.loads(job_file_content(objects))["spec"]["generation"]["parallelism"]["tensor"]
    demands = []
    for pod in objects.pods:
        container = _container(pod)
        gpus = int(container["resources"].get("limits", {}).get(GPU_RESOURCE, 0))
        threads = int(_environment(container, {}).get(Env.THREADS, "1"))
        ranks = _ranks(_environment(container, {}))
        threads *= split if _group(pod) is Group.GENERATION else ranks  # each process has its own threads
        demands.append(DeviceDemand(_name(pod), _group(pod), threads, gpus, ranks))
    return demands


def local_processes(
    objects: RenderedObjects,
    paths: RunPaths,
    shares: Mapping[str, DeviceShare],
    ports: JobPorts,
    caller: Mapping[str, str],
) -> list[LocalProcess]:
    """Return one process per pod, in the order of the pods. `caller` is the environment of the command; it provides
    variables that a template takes from Secrets. Raises RunError for one that a non-empty `caller` lacks.
    """
    spec = json.loads(job_file_content(objects))["spec"]
    start_timeout = str(spec["runPolicy"]["startTimeoutSeconds"])
    processes = []
    for pod in objects.pods:
        process = _local_process(pod, paths, shares[_name(pod)], ports, caller)
        if process.group is not Group.COORDINATOR:
            # In a cluster a coordinator may wait for a node, which the operator sees; here it starts at once or never.
            process.env[Env.START_TIMEOUT] = start_timeout
        processes.append(process)
    return processes


def job_file_content(objects: RenderedObjects) -> bytes:
    """Return the resolved job as the ConfigMap of the coordinator's pod contains it."""
    (config_map,) = (item for item in objects.supporting if item["kind"] == "ConfigMap")
    return str(config_map["data"][JOB_KEY]).encode()


def _local_process(
    pod: Json, paths: RunPaths, share: DeviceShare, ports: JobPorts, caller: Mapping[str, str]
) -> LocalProcess:
    container, group, name = _container(pod), _group(pod), _name(pod)
    env = {key: value for key, value in _environment(container, caller).items() if key not in _LEFT_OUT}
    address, port_variables = _addresses(env, group, share, ports)
    local = {
        Env.JOB_FILE: str(paths.job_file),
        Env.RUN_DIR: str(paths.run_dir),
        Env.COORDINATOR: f"{LOOPBACK}:{ports.coordinator}",
        Env.LISTEN: address,
        Env.ADVERTISE: address,
        Env.RENDEZVOUS: LOOPBACK,
        Env.CERTIFICATES: str(paths.certificates),
    }
    env.update({key.value: value for key, value in local.items() if key.value in env})
    env.update(_bytecode(caller))
    env |= port_variables
    visible = ",".join(dict.fromkeys(share.gpus))
    if visible or "cuda" not in env.get(Env.DEVICE, "cuda"):
        env["CUDA_VISIBLE_DEVICES"] = visible
    if share.gpus and "CUDA_VISIBLE_DEVICES" not in caller:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi's numbering, which the numbers use; CUDA's own may differ
    if share.cores is None and int(env.get(Env.THREADS, "1")) > 1 and "OMP_WAIT_POLICY" not in caller:
        # Threads that spin would hold cores that others need.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if share.sharers > 1:
        env[Env.DEVICE_SHARERS] = str(share.sharers)
    return LocalProcess(
        name=name,
        group=group,
        command=(sys.executable, *container["command"][1:]),
        env=env,
        folder=paths.base,
        log=paths.log(name),
        cores=share.cores,
        port=int(address.partition(",")[0].rpartition(":")[2]),
        device=f"cuda:{visible}" if visible else "cpu",
        endpoint=env[Env.METRICS],
    )


def _addresses(env: Mapping[str, str], group: Group, share: DeviceShare, ports: JobPorts) -> tuple[str, dict[str, str]]:
    """Return the address at which a process listens, and variables of its other ports.

    For a pod of several ranks, the address has one entry per rank, and the variables include the ranks' devices.
    """
    if (count := _ranks(env)) == 1:
        is_rank = Env.RENDEZVOUS.value in env
        own = ports.of_coordinator() if group is Group.COORDINATOR else ports.of_worker(is_rank=is_rank)
        port_variables = {Env.METRICS.value: f"{LOOPBACK}:{own.metrics}"}
        if own.rendezvous is not None:
            port_variables[Env.RENDEZVOUS_PORT.value] = str(own.rendezvous)
        return f"{LOOPBACK}:{own.listen}", port_variables
    pod = ports.of_ranks(count)
    visible = list(dict.fromkeys(share.gpus))
    return joined([f"{LOOPBACK}:{rank.listen}" for rank in pod.ranks]), {
        Env.METRICS.value: f"{LOOPBACK}:{pod.metrics}",
        Env.RANK_METRICS.value: joined([f"{LOOPBACK}:{rank.metrics}" for rank in pod.ranks]),
        Env.RENDEZVOUS_PORT.value: joined([str(rank.rendezvous) for rank in pod.ranks]),
        Env.DEVICE.value: joined([f"cuda:{visible.index(gpu)}" for gpu in share.gpus] or ["cpu"] * count),
    }


def _ranks(env: Mapping[str, str]) -> int:
    """Return the number of training ranks that a pod starts as separate processes; 1 for a pod that is one process."""
    return int(env.get(Env.RANKS, "1"))


def _bytecode(caller: Mapping[str, str]) -> dict[str, str]:
    """Return variables that put bytecode into the user's cache, for a caller that wants none next to its sources."""
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
            origin = f"key {source['key']} of Secret {source['name']}" if source else "valueFrom"
            raise RunError(f"env {name}: {origin} needs a cluster; set {name} in the environment instead")
    return env


def _container(pod: Json) -> Json:
    containers: Sequence[Json] = pod["spec"]["containers"]
    return next(container for container in containers if container["name"] == CONTAINER)


def _group(pod: Json) -> Group:
    return Group(pod["metadata"]["labels"][names.LABEL_GROUP])


def _name(pod: Json) -> str:
    group = _group(pod)
    if group is Group.COORDINATOR:
        return group.value
    return names.worker_name(group, int(pod["metadata"]["labels"][names.LABEL_INDEX]))
