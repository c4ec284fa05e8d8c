"""Carries out faults on a real cluster, and detects the end of each from facts.

Rule: thin; chaos.py decides which fault hits which victim. Every fault ends with a fact (an object with another uid, a
container with another id, an answer of the API server), never after a time; only the cut network has a duration. A
victim that is down is waited for. A fault is undone before it returns, except for what the cluster itself must repair.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final

from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.faults.chaos import WORKERS, Fault, Kind
from tests.cluster.faults.chaos_operators import InstalledOperator, Operators
from tests.cluster.jobs_in_pods.gated_job import NAME, GatedJob
from tests.cluster.node import Node
from tests.cluster.processes import STOP_GRACE, wait_until

PATIENCE: Final = 900.0  # seconds for any one fact
LOOK_SECONDS: Final = 1.0  # a check costs a kubectl, which takes a tenth of a second of a core
FAILED_SECONDS: Final = 10.0  # between two checks whether the job has failed
NODE: Final = "n1"


class Faults:
    """Faults for one job."""

    def __init__(self, cluster: Cluster, job: GatedJob, operators: Operators | InstalledOperator) -> None:
        self._cluster, self._job, self._operators = cluster, job, operators
        self._node: Node = cluster.nodes[NODE]
        self._failed_again = Timer(FAILED_SECONDS)
        pods = (Kind.DELETE, Kind.FORCE, Kind.EVICT)
        objects = (Kind.SERVICE, Kind.CONFIG_MAP, Kind.NETWORK_POLICY)
        restarts = {Kind.API_SERVER: "kube-apiserver", Kind.ETCD: "etcd"}
        self._by: dict[Kind, Callable[[Fault], None]] = {
            **dict.fromkeys(pods, self._lose_pod),
            **dict.fromkeys(objects, self._delete_object),
            **{kind: self._restarter(name) for kind, name in restarts.items()},
            Kind.SECRET: self._delete_secret,
            Kind.KILL: self._kill,
            Kind.CUT: self._cut,
            Kind.KUBELET: self._kubelet,
            Kind.OPERATOR: self._operator,
            Kind.STANDBY: self._standby,
            Kind.SUSPEND: self._suspend,
            Kind.RESIZE: self._resize,
            Kind.OUT_OF_MEMORY: self._out_of_memory,
            Kind.DRAIN: self._drain,
        }

    def happen(self, fault: Fault) -> None:
        """Return when the fault is over. Raises TimeoutError naming the missing fact, or AssertionError if the job has
        failed.
        """
        self._by[fault.kind](fault)

    def until(self, event: str, holds: Callable[[], object]) -> None:
        """Wait for a fact while restarting operators; raises AssertionError if the job has failed."""
        wait_until(event, holds, PATIENCE, check=self._check, every=LOOK_SECONDS)

    def iteration(self) -> None:
        """Wait until another iteration is trained."""
        done = self._job.trained()
        self._job.allow(done + 1)
        self.until(f"iteration {done + 1} to be trained", lambda: self._job.trained() > done)

    def _check(self) -> None:
        self._operators.keep()
        if not self._failed_again():
            return
        self._failed_again = Timer(FAILED_SECONDS)
        failed = self._job.condition("Failed")
        assert failed.get("status") != "True", f"the job has failed: {failed['message']}"

    def _running(self, worker: str) -> str:
        """Return the id of a worker's container, once it runs."""
        container = ""

        def runs() -> bool:
            nonlocal container
            container = self._job.container(worker)
            return bool(container)

        self.until(f"{worker} to run", runs)
        return container

    def _uid(self, name: str) -> str:
        """Return the uid of an object given as kind/name, once it exists and the API server answers."""
        uid = ""

        def there() -> bool:
            nonlocal uid
            uid = self._job.uid(name)
            return bool(uid)

        self.until(f"{name} to be there", there)
        return uid

    def _lose_pod(self, fault: Fault) -> None:
        self._running(fault.victim)
        name = f"{NAME}-{fault.victim}"
        before = self._uid(f"pod/{name}")
        if fault.kind is Kind.EVICT:
            where = self._job.where.partition("=")[2]
            eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": where}}
            path = f"/api/v1/namespaces/{where}/pods/{name}/eviction"
            self._cluster.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(eviction))
        else:
            force = ["--grace-period=0", "--force"] if fault.kind is Kind.FORCE else []
            self._job.kubectl("delete", "pod", name, "--wait=false", *force)
        self._replaced(fault.victim, before)

    def _kill(self, fault: Fault) -> None:
        before = self._running(fault.victim)
        self._node.run([*self._ctr, "tasks", "kill", "--signal=SIGKILL", before])
        self.until(
            f"another container of {fault.victim}", lambda: self._job.container(fault.victim) not in ("", before)
        )

    def _out_of_memory(self, fault: Fault) -> None:
        """Limit a container to its present memory and let a process in it ask for more: the kernel kills the largest
        one.
        """
        before = self._running(fault.victim)
        self._node.exhaust(before)
        self.until(
            f"another container of {fault.victim}", lambda: self._job.container(fault.victim) not in ("", before)
        )
        ended: list[dict[str, Any]] = []

        def said() -> bool:
            statuses = self._job.pod(fault.victim).get("status", {}).get("containerStatuses", [])
            ended[:] = [status["lastState"]["terminated"] for status in statuses if "terminated" in status["lastState"]]
            return bool(ended)

        self.until("how it ended to be said", said)
        assert ended[0]["reason"] == "OOMKilled", ended

    def _drain(self, fault: Fault) -> None:
        """Evict all pods of the job at once; none finds a node before the node is uncordoned."""
        before = {worker: self._uid(f"pod/{NAME}-{worker}") for worker in WORKERS}
        selector = f"--pod-selector=rlhf.dev/job-name={NAME}"
        drained = ("--force", "--delete-emptydir-data", "--ignore-daemonsets", f"--timeout={PATIENCE:.0f}s")
        try:
            self._cluster.kubectl("drain", NODE, selector, *drained, timeout=2 * PATIENCE)
        finally:
            self._cluster.kubectl("uncordon", NODE)
        for worker, uid in before.items():
            self._replaced(worker, uid)

    def _replaced(self, worker: str, uid: str) -> None:
        """Wait until another pod of a worker runs."""
        name = f"{NAME}-{worker}"
        self.until(f"another pod {name}", lambda: self._job.uid(f"pod/{name}") not in ("", uid))
        self._running(worker)

    def _cut(self, fault: Fault) -> None:
        """Drop all packets from and to the pod in its own network namespace; its loopback continues to work."""
        container = self._running(fault.victim)
        rules = [("INPUT", "-i"), ("OUTPUT", "-o")]
        for chain, direction in rules:
            self._in_network(container, "-I", chain, "!", direction, "lo", "-j", "DROP")
        self._job.allow(self._job.trained() + 1)
        over = Timer(fault.seconds)
        self.until("the cut to last", over)
        try:
            for chain, direction in rules:
                self._in_network(container, "-D", chain, "!", direction, "lo", "-j", "DROP")
        except ClusterError:  # the cut ended the process, and with it the access to its namespace
            after = self._job.container(fault.victim)
            assert after != container, f"the network of {fault.victim} cannot be given back"
            self._restore(fault.victim, rules)

    def _restore(self, worker: str, rules: list[tuple[str, str]]) -> None:
        """Restore the network; a later container of the same pod shares its network, which is still cut."""
        container = self._running(worker)
        for chain, direction in rules:
            if "DROP" in self._in_network(container, "-S", chain):
                self._in_network(container, "-D", chain, "!", direction, "lo", "-j", "DROP")

    def _in_network(self, container: str, *arguments: str) -> str:
        lines = self._node.run([*self._ctr, "tasks", "list"]).splitlines()
        pid = next((line.split()[1] for line in lines if line.startswith(container)), "")
        if not pid:
            raise ClusterError(f"container {container} does not run")
        return self._node.run(["nsenter", f"--target={pid}", "--net", "--", "iptables", "-w", *arguments])

    @property
    def _ctr(self) -> list[str]:
        return ["ctr", f"--address={self._node.folder / 'containerd.sock'}", "--namespace=k8s.io"]

    def _kubelet(self, fault: Fault) -> None:
        processes = self._cluster.component("kubelet")
        processes.stop("kubelet", grace=_grace(fault))
        lease = ("get", "lease", NODE, "--namespace=kube-node-lease", "--output=jsonpath={.spec.renewTime}")
        before = self._job.answer(*lease)
        try:
            self.iteration()
        finally:
            processes.restart("kubelet")
        # Ready may be an old report of the kubelet; its Lease shows that it is back.
        self.until("the kubelet to renew its Lease", lambda: self._job.answer(*lease) not in (None, "", before))
        ready = "--output=jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        self.until("the node to be Ready", lambda: self._job.answer("get", "node", NODE, ready) == "True")

    def _restarter(self, name: str) -> Callable[[Fault], None]:
        def restart(fault: Fault) -> None:
            self._cluster.component(name).restart(name, grace=_grace(fault))
            self.until("the API server's /readyz", lambda: self._job.answer("get", "--raw=/readyz") == "ok")
            self.until("an operator to lead", self._operators.leads)

        return restart

    def _operator(self, fault: Fault) -> None:
        assert isinstance(self._operators, Operators), "of a release, the Deployment starts operators"
        self._operators.end(fault.victim)
        self._operators.add()
        self.until("the next operator to lead", self._operators.leads)

    def _standby(self, fault: Fault) -> None:
        assert isinstance(self._operators, Operators), "of a release, the Deployment starts operators"
        standby = self._operators.add()
        self.until("the standby to be up", standby.healthy)
        self._operators.end(fault.victim)
        self.until("the standby to lead", standby.leads)

    def _delete_object(self, fault: Fault) -> None:
        name = fault.victim.format(job=NAME)
        before = self._uid(name)
        self._job.kubectl("delete", name, "--wait=false")
        self.until(f"{name} to be made again", lambda: self._job.uid(name) not in ("", before))

    def _delete_secret(self, fault: Fault) -> None:
        """Delete the Secret and a pod: the operator reads the Secret only when a pod mounts it."""
        name, worker = fault.victim.format(job=NAME), "generation-0"
        self._running(worker)
        secret, pod = self._uid(name), self._uid(f"pod/{NAME}-{worker}")
        self._job.kubectl("delete", name, f"pod/{NAME}-{worker}", "--wait=false")
        self.until(f"{name} to be made again", lambda: self._job.uid(name) not in ("", secret))
        self._replaced(worker, pod)

    def _suspend(self, fault: Fault) -> None:
        self._job.patch(suspend=True)
        self.until("the job to be suspended", lambda: self._job.condition("Suspended").get("status") == "True")
        assert not self._job.container("coordinator")
        self._job.patch(suspend=False)

    def _resize(self, fault: Fault) -> None:
        self._job.kubectl("scale", f"rlhfjob/{NAME}", "--replicas=2")
        self._running("generation-1")
        self.iteration()
        self._job.kubectl("scale", f"rlhfjob/{NAME}", "--replicas=1")
        gone = ("get", f"pod/{NAME}-generation-1", "--ignore-not-found", "--output=name", self._job.where)
        self.until("generation-1 to be gone", lambda: self._job.answer(*gone) == "")


class Timer:
    """Becomes True a number of seconds after its first call."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._deadline = seconds, 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        self._deadline = self._deadline or now + self._seconds
        return now >= self._deadline


def _grace(fault: Fault) -> float:
    return STOP_GRACE if fault.victim == "SIGTERM" else 0.0
