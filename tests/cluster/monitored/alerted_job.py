"""A job, and operators, with faults that alerts must detect.

Rule: a fault is caused realistically, with files, signals and packets; the test decides which alert reports it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.jobs_in_pods.gated_job import GATED_REWARD, RECORD, GatedJob
from tests.cluster.monitored.firing_alerts import PATIENCE
from tests.cluster.node import Node
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until
from tests.support.jobs import local_job

MODE = "mode"
REWARD_WITH_MODES = """
TRIED = set()


def score(prompt, response, record):
    wait(prompt, response, record)
    mode = number(FOLDER / {mode!r}, str)
    if mode == "none":
        return None
    if mode == "huge":
        return 3e38 if len(response) % 2 else -3e38
    if mode == "low":
        return 0.0
    if mode == "nan" and response not in TRIED:
        TRIED.add(response)
        return float("nan")
    return 1 + digits(prompt, response, record)


"""
"""Returns 1 plus the share of digits in a response, unless the file MODE names a fault of the reward."""


class AlertedJob(GatedJob):
    """The tiny job with a gate in its reward, and a reward that fails on command."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path, node: Node) -> None:
        super().__init__(cluster, namespace, folder, forgiven=100, iterations=100000)
        self._node = node
        spec = self.manifest["spec"]
        spec["generation"]["replicas"] = 1
        small = {"requests": {"cpu": "50m", "memory": "256Mi"}}  # so that two coordinators fit on the node
        spec["coordinator"] = {"template": {"spec": {"containers": [{"name": "worker", "resources": small}]}}}
        spec["models"]["reward"]["retries"] = 20
        spec["training"]["optimizer"]["maxNonFiniteSteps"] = 1000
        spec["runPolicy"]["workerTimeoutSeconds"] = 5
        gated = GATED_REWARD.format(folder=str(folder), record=RECORD, gate="gate")
        gated = gated.replace("def score(", "def wait(").replace("    return digits(prompt, response, record)\n", "")
        digits = local_job.REWARD.replace("def score(", "def digits(")
        (folder / "reward.py").write_text(gated + REWARD_WITH_MODES.format(mode=MODE) + digits)
        self.reward("right")

    def reward(self, mode: str) -> None:
        """Set the behaviour of its reward."""
        (self.folder / MODE).write_text(mode)

    def hold(self) -> None:
        """Let no further iterations end."""
        self.allow(self.trained())

    def until_running(self, worker: str) -> str:
        """Wait until a worker's container runs; return its id, which identifies it without the API server."""
        found = ""

        def runs() -> bool:
            nonlocal found
            found = self.container(worker)
            return bool(found)

        wait_until(f"{worker} to run", runs, PATIENCE, every=0.5)
        return found

    def signal(self, container: str, name: str) -> None:
        """Send a signal such as SIGSTOP to a container."""
        self._node.run([*self._ctr, "tasks", "kill", f"--signal={name}", container])

    def cut(self, container: str, port: int, *, begin: bool) -> None:
        """Start or stop dropping the TCP packets to a port of a container's pod."""
        listed = self._node.run([*self._ctr, "tasks", "list"]).splitlines()
        pid = next((line.split()[1] for line in listed if line.startswith(container)), "")
        if not pid:
            raise ClusterError(f"container {container} does not run")
        action = "-I" if begin else "-D"
        rule = ["INPUT", "-p", "tcp", "--dport", str(port), "-j", "DROP"]
        self._node.run(["nsenter", f"--target={pid}", "--net", "--", "iptables", "-w", action, *rule])

    def beside(self, name: str, *, image: str = "", **template: Any) -> dict[str, Any]:
        """Return the same job with another name, with another image, or with an addition to the template of all its
        pods.
        """
        job: dict[str, Any] = json.loads(json.dumps(self.manifest))
        job["metadata"]["name"] = name
        job["spec"]["checkpoints"]["path"] += f"/{name}"
        for group in ("coordinator", "generation", "inference", "training"):
            spec = job["spec"][group]["template"]["spec"]
            spec |= template
            spec["containers"][0] |= {"image": image} if image else {}
        return job

    @property
    def _ctr(self) -> list[str]:
        return ["ctr", f"--address={self._node.folder / 'containerd.sock'}", "--namespace=k8s.io"]


class WatchedOperators:
    """Operators that come and go, each a target of Prometheus as long as it runs."""

    def __init__(self, cluster: Cluster, folder: Path, *arguments: str) -> None:
        self._cluster, self._arguments = cluster, arguments
        self._targets = folder / "operators.json"
        self._running: list[OperatorProcess] = []
        self._tell()

    @property
    def scrape(self) -> dict[str, Any]:
        """Return the scrape configuration of the operators, as in the chart's ServiceMonitor, but for processes."""
        found = {"files": [str(self._targets)], "refresh_interval": "1s"}
        return {"job_name": "rlhf-operator", "honor_labels": True, "file_sd_configs": [found]}

    def add(self, *arguments: str) -> OperatorProcess:
        """Start one more, which waits for the Lease if another has it."""
        process = OperatorProcess(self._cluster, *self._arguments, *arguments)
        process.launch()
        self._running.append(process)
        self._tell()
        return process

    def kill(self, process: OperatorProcess) -> None:
        """Kill it like the death of its node: it is no longer a target."""
        self._running.remove(process)
        process.kill()
        self._tell()

    def keep(self) -> None:
        """Restart those that lost their Lease; raise if one has ended by itself for another reason."""
        for process in self._running:
            process.check()

    def end(self) -> None:
        """Stop all of them."""
        for process in self._running:
            process.stop()

    def _tell(self) -> None:
        targets = [process.metrics_address for process in self._running]
        content = [{"targets": targets, "labels": {"namespace": "rlhf-system"}}]
        partial = self._targets.with_suffix(".partial")
        partial.write_text(json.dumps(content))
        partial.replace(self._targets)
