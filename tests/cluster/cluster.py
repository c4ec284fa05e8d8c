"""The cluster as a whole: one context manager over control plane and nodes.

Owns the start order, the stop, the logs stored after a failure, and the operations that tests need. Rule: `stop` leaves
the machine as `start` found it, and `start` first removes the leftovers of a crashed run. When this process dies at any
line, its processes die with it; links, control groups and folders are removed at the next start of a cluster by the
same user.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from tests.cluster import kwok, leftovers
from tests.cluster.certificates import ClusterAuthority
from tests.cluster.control_plane import ControlPlane
from tests.cluster.network import make_bridge, route_services, start_dns
from tests.cluster.node import START_TIMEOUT, Node
from tests.cluster.processes import STOP_GRACE, ClusterError, Processes, wait_until
from tests.cluster.settings import ClusterSettings
from tests.cluster.slots import SLOTS, Slot, ports_free, slots_root, try_lock
from tests.cluster.toolchain import binary

__all__ = ["Cluster", "ClusterError"]

KUBECTL_TIMEOUT = (
    300.0  # seconds for one kubectl call without its own time-out: it may wait for the deletion of an object
)
BUSY = (
    "etcdserver: request timed out",
    "etcdserver: leader changed",
    "TLS handshake timeout",
    "http2: client connection lost",
    "unable to return a response in the time allotted",
)
"""Messages about an overloaded server; a read is then retried, as a person would do."""
READS = 5
"""Attempts of a read at a busy server."""
NODE_COMPONENTS = ("containerd", "kubelet", "kube-proxy", "kube-network-policies", "device-plugin")
Manifest = Mapping[str, Any]


class Cluster:
    """A running cluster between `start` and `stop`; takes a ClusterSettings or its fields."""

    def __init__(self, settings: ClusterSettings | None = None, **choices: Any) -> None:
        self.settings = settings or ClusterSettings(**choices)
        self.nodes: dict[str, Node] = {}
        """Real nodes by name."""
        self._slot: Slot | None = None
        self._processes: Processes | None = None
        self._kwok = False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(failed=kind is not None)

    def start(self) -> Self:
        """Start everything of the level and wait until it can be used.

        When it returns, the API server answers /readyz. From level control-plane on, namespace default has its service
        account. At level node, every node is Ready (so its network plugin is configured) with its GPUs, CoreDNS accepts
        connections, and kube-proxy of every node has the rules of service kubernetes.
        Not guaranteed: that a newly applied definition is served (`define` waits), that a new namespace has its service
        account (`add_namespace` waits), and that names and rules of a newly applied service are known.

        Raises ClusterError, ToolchainError, or TimeoutError naming what did not happen; no process remains then.
        """
        leftovers.sweep()
        self._slot = _take_slot()
        try:
            self._start(self._slot)
        except BaseException:
            self.stop(failed=True)
            raise
        return self

    def stop(self, *, failed: bool = False) -> None:
        """Stop everything and remove every trace; with `failed`, keep the logs and print their place."""
        if self._slot is None:
            return
        with contextlib.ExitStack() as steps:  # all steps run, last first, even if some fail
            steps.callback(self._forget)
            steps.callback(self._slot.release)
            steps.callback(leftovers.clean, self._slot)
            if self._processes:
                steps.callback(self._processes.end)
            for node in self.nodes.values():
                steps.callback(node.end)
            if failed:
                steps.callback(self._keep_logs, self._slot)

    @property
    def folder(self) -> Path:
        """Return the instance's folder; deleted by `stop`."""
        return self._running().folder

    @property
    def kubeconfig(self) -> Path:
        """Return the cluster administrator's kubeconfig."""
        return self.folder / "pki" / "admin.kubeconfig"

    @property
    def server(self) -> str:
        """Return the URL of the API server for the host and every pod."""
        return self._control_plane.server

    def port(self, index: int) -> int:
        """Return the `index`-th loopback TCP port that is reserved for this cluster; the first four belong to its
        components.
        """
        return self._running().addresses.port(index)

    def user(self, name: str, *groups: str) -> Path:
        """Return a kubeconfig for any user name and groups, with the rights that RBAC grants them."""
        return self._control_plane.kubeconfig(name.replace(":", "-").replace("/", "-"), name, *groups)

    def kubectl(
        self,
        *arguments: str,
        stdin: str | None = None,
        timeout: float = KUBECTL_TIMEOUT,
        kubeconfig: Path | None = None,
    ) -> str:
        """Run kubectl and return its output; raises ClusterError with the output, or TimeoutExpired."""
        return self._run_client("kubectl", arguments, stdin, timeout, kubeconfig)

    def helm(self, *arguments: str, timeout: float = KUBECTL_TIMEOUT, kubeconfig: Path | None = None) -> str:
        """Run helm and return its output; raises ClusterError with the output, or TimeoutExpired."""
        return self._run_client("helm", arguments, None, timeout, kubeconfig)

    def watch(self, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        """Run `kubectl get --watch` in the background with its output in `log`; the caller ends it."""
        command, environment = self._client("kubectl", ("get", *arguments, "--watch"), None)
        with log.open("wb") as out:
            return subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def following(self, steps: contextlib.ExitStack, *arguments: str) -> Path:
        """Run kubectl in the background until `steps` end; return the file with its output."""
        log = self.folder / f"kubectl-{uuid.uuid4().hex}.log"
        command, environment = self._client("kubectl", arguments, None)
        with log.open("wb") as out:
            process = steps.enter_context(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
        steps.callback(process.terminate)
        return log

    def apply(self, manifests: Path | Manifest | Iterable[Manifest], *options: str) -> str:
        """Apply a file, one object or several with kubectl."""
        if isinstance(manifests, Path):
            return self.kubectl("apply", f"--filename={manifests}", *options)
        objects = [manifests] if isinstance(manifests, Mapping) else list(manifests)
        return self.kubectl("apply", "--filename=-", *options, stdin=yaml.safe_dump_all(objects))

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return the parsed JSON of kubectl get."""
        answer: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "--output=json"))
        return answer

    def component(self, name: str, node: str = "n1") -> Processes:
        """Return the processes that include `name`, to stop, freeze or restart it:
        `cluster.component("kubelet").restart("kubelet")`.
        """
        processes = self.nodes[node].processes if name in NODE_COMPONENTS else self._processes
        assert processes is not None
        return processes

    def define(self, definitions: Path) -> None:
        """Apply the custom resource definitions of a file and wait until the API server serves them."""
        self.apply(definitions)
        for body in yaml.safe_load_all(definitions.read_text()):
            self.wait_defined(f"{body['spec']['names']['plural']}.{body['spec']['group']}")

    def wait_defined(self, name: str) -> None:
        """Wait until the API server serves the custom resource `name`, given as plural.group."""

        def established() -> bool:  # kubectl's wait and jsonpath fail while a definition has no conditions yet
            conditions = self.get(f"crd/{name}").get("status", {}).get("conditions") or []
            return any(item["type"] == "Established" and item["status"] == "True" for item in conditions)

        wait_until(f"{name} to be established", established, KUBECTL_TIMEOUT)
        group = name.partition(".")[2]
        listed = ("api-resources", f"--api-group={group}", "--output=name")
        wait_until(f"{name} to be served", lambda: name in self.kubectl(*listed).split(), START_TIMEOUT, every=0.2)

    def add_namespace(self, name: str, labels: Mapping[str, str] | None = None) -> None:
        """Create a namespace and wait until pods can be created in it."""
        metadata = {"name": name, "labels": dict(labels or {})}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        if self.settings.level != "api":
            self._wait_account(name)

    def wait_ready(self) -> None:
        """Wait until the API server answers /readyz, for instance after its restart."""
        wait_until("the API server's /readyz", self._control_plane.ready, START_TIMEOUT, check=self.check)

    def wait_nodes(self) -> None:
        """Wait until every real node is Ready with its GPUs."""
        wait_until(f"nodes {sorted(self.nodes)} to be Ready", self._nodes_ready, START_TIMEOUT, check=self.check)
        for name in self.nodes:
            self.set_gpus(name, self.settings.gpus)

    def set_gpus(self, node: str, count: int, *, unhealthy: int = 0) -> None:
        """Give a real node `count` GPUs, the last `unhealthy` of them broken, and wait until the scheduler can know."""
        self.nodes[node].set_gpus(count, unhealthy)
        usable = str(count - unhealthy)

        def has_gpus() -> bool:
            return str(self.get("node", node)["status"]["allocatable"].get("nvidia.com/gpu", "0")) == usable

        wait_until(f"node {node} to have {usable} usable GPUs", has_gpus, START_TIMEOUT, check=self.check)

    def add_kwok_nodes(self, count: int, *, gpus: int = 8, first: int = 0) -> list[str]:
        """Add fake nodes that accept pods and run nothing; tainted kwok.x-k8s.io/node, so that real pods stay away."""
        if self.settings.level == "api":
            raise ClusterError("level 'api' has no scheduler; kwok nodes need level 'control-plane' or 'node'")
        if not self._kwok:
            kwok.start(self._running(), self._control_plane, self.component("kwok"), self.settings.extra("kwok"))
            self._kwok = True
        nodes = [kwok.node(index, gpus=gpus) for index in range(first, first + count)]
        self.apply(nodes, "--server-side")
        names = [str(node["metadata"]["name"]) for node in nodes]
        wait_until(
            f"{count} kwok nodes to be Ready",
            lambda: set(names) <= self._ready_nodes(),
            START_TIMEOUT + count * 0.1,
            every=0.5,
            check=self.check,
        )
        return names

    def check(self) -> None:
        """Raise ClusterError if a component has ended by itself."""
        for processes in [self._processes, *(node.processes for node in self.nodes.values())]:
            if processes:
                processes.check()

    def _forget(self) -> None:
        self._slot, self._processes, self.nodes, self._kwok = None, None, {}, False

    def _running(self) -> Slot:
        if self._slot is None:
            raise ClusterError("the cluster is not running")
        return self._slot

    def _start(self, slot: Slot) -> None:
        (slot.folder / "logs").mkdir(parents=True)
        slot.record()
        level = self.settings.level
        if level == "node":
            make_bridge(slot)
        self._processes = Processes(slot, slot.folder / "logs")
        self._control_plane = ControlPlane(slot, self.settings, self._processes, ClusterAuthority(slot.folder / "pki"))
        self._control_plane.kubeconfig("admin", "admin", "system:masters")
        self._control_plane.start()
        if level == "node":
            start_dns(slot, self._control_plane, self._processes)
            for index in range(self.settings.nodes):
                self.nodes[f"n{index + 1}"] = Node(slot, self.settings, self._control_plane, index)
            for node in self.nodes.values():
                node.start()
            route_services(slot)
        if level != "api":
            self._wait_account("default")
        self.wait_nodes()
        for node in self.nodes.values():
            wait_until(f"kube-proxy's rules on {node.name}", node.serves, START_TIMEOUT, check=self.check, every=0.2)

    def _run_client(
        self, name: str, arguments: tuple[str, ...], stdin: str | None, timeout: float, kubeconfig: Path | None
    ) -> str:
        command, environment = self._client(name, arguments, kubeconfig)
        for more in reversed(range(READS if arguments[:1] == ("get",) else 1)):
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False, env=environment
            )
            if not (done.returncode and more and any(words in done.stderr for words in BUSY)):
                break
            time.sleep(1)
        if done.returncode:
            raise ClusterError(f"{name} {' '.join(arguments)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def _client(
        self, name: str, arguments: tuple[str, ...], kubeconfig: Path | None
    ) -> tuple[list[str], dict[str, str]]:
        """Return command and environment of a client."""
        command = [str(binary(name)), f"--kubeconfig={kubeconfig or self.kubeconfig}", *arguments]
        # Both cache under HOME by server address; a later cluster of the slot has the same address with other contents.
        home = {f"HELM_{kind}_HOME": str(self.folder / f"helm-{kind}") for kind in ("CACHE", "CONFIG", "DATA")}
        return command, os.environ | home | {"KUBECACHEDIR": str(self.folder / "kubectl-cache")}

    def _wait_account(self, namespace: str) -> None:
        """Wait until pods can be created in `namespace`: admission refuses them without a service account."""
        account = (
            "get",
            "serviceaccount",
            "default",
            f"--namespace={namespace}",
            "--ignore-not-found",
            "--output=name",
        )
        account_name = f"the service account of namespace {namespace}"
        wait_until(account_name, lambda: self.kubectl(*account), START_TIMEOUT, check=self.check)

    def _nodes_ready(self) -> bool:
        return set(self.nodes) <= self._ready_nodes()

    def _ready_nodes(self) -> set[str]:
        ready = "{.status.conditions[?(@.type=='Ready')].status}"
        path = "{range .items[?(@.status.conditions)]}{.metadata.name}=" + ready + " {end}"
        answer = self.kubectl("get", "nodes", f"--output=jsonpath={path}")
        return {name for name, _, status in (word.partition("=") for word in answer.split()) if status == "True"}

    def _keep_logs(self, slot: Slot) -> None:
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        parent = Path(os.environ.get("RLHF_CLUSTER_LOGS", Path(tempfile.gettempdir()) / "rlhf-cluster-logs"))
        saved_logs = parent / f"{stamp}-slot{slot.number}"
        with contextlib.suppress(ClusterError, subprocess.TimeoutExpired, FileNotFoundError):
            for resource in ("events", "pods", "nodes"):
                path = slot.folder / "logs" / f"{resource}.yaml"
                path.write_text(self.kubectl("get", resource, "--all-namespaces", "--output=yaml", timeout=STOP_GRACE))
        for source in sorted({slot.folder / "logs", *slot.folder.glob("n*/log")}):
            target = saved_logs if source.parent == slot.folder else saved_logs / source.parent.name
            shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True)
        print(f"cluster logs kept in {saved_logs}", file=sys.stderr, flush=True)


def _take_slot() -> Slot:
    root = slots_root()
    for number in range(SLOTS):
        slot = try_lock(root, number)
        if slot is None:
            continue
        if not slot.folder.exists() and ports_free(slot.addresses):
            slot.folder.mkdir(mode=0o700)
            return slot
        if slot.folder.exists():  # its owner died after our sweep; the next sweep removes it
            slot.leave()
        else:
            slot.release()
    raise ClusterError(f"all {SLOTS} slots in {root} are taken; stop a cluster or wait")
