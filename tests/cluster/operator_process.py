"""The operator as a process on this machine, as a user of a test cluster.

Rule: started and stopped by its own pid; its log is beside those of the cluster's components, so it is stored with them
when a test fails. An operator that could not renew its Lease in time must end; it is restarted, as by a Deployment, and
any other end is an error.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.parser import text_string_to_metric_families
from tests.cluster import environment, images
from tests.cluster.cluster import Cluster
from tests.cluster.processes import tail, wait_until

from rlhf_cli.local.ports import free_ports

START_TIMEOUT = 240.0  # seconds until it leads
LEASE_LOST = "was not renewed"
"""Text in the last line of an operator that could not renew its Lease, for instance because the machine stalled."""
STOP_TIMEOUT = 120.0  # seconds until it has given its Lease back and ended


ROOT = Path(__file__).parents[2]


def beside_node(cluster: Cluster, *arguments: str) -> OperatorProcess:
    """Return an unstarted operator for a cluster with a real node; its jobs' pods find this machine's environment."""
    cluster.nodes["n1"].import_image(images.mounted(Path(environment.PYTHON).parent))
    cluster.define(ROOT / "crds" / "rlhfjobs.yaml")
    image = images.MOUNTED
    return OperatorProcess(cluster, f"--coordinator-image={image}", f"--worker-image={image}", *arguments)


class OperatorProcess:
    """`python -m rlhf_operator` against a cluster, between `start` and `stop`."""

    def __init__(self, cluster: Cluster, *arguments: str, kubeconfig: Path | None = None) -> None:
        self._cluster = cluster
        self._arguments = arguments
        self._kubeconfig = kubeconfig or cluster.kubeconfig
        self._process: subprocess.Popen[bytes] | None = None
        self.log = cluster.folder / "logs" / "operator.log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, patience: float = START_TIMEOUT) -> None:
        """Start it and wait until it leads."""
        self.launch()
        wait_until("the operator to lead", self.leads, patience, check=self.check)

    def launch(self) -> None:
        """Start it; beside another one it becomes a standby."""
        ports = free_ports(random.Random())
        health, metrics = next(ports), next(ports)
        self._health, self._metrics = f"127.0.0.1:{health}", f"127.0.0.1:{metrics}"
        self._run()

    def _run(self) -> None:
        self._said = self.log.stat().st_size if self.log.exists() else 0
        command = [sys.executable, "-m", "rlhf_operator", f"--health-address={self._health}"]
        command += [f"--metrics-address={self._metrics}", "--log-format=text", *self._arguments]
        with self.log.open("ab") as log:
            environment = os.environ | {"KUBECONFIG": str(self._kubeconfig)}
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def runs(self) -> bool:
        """Return whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def leads(self) -> bool:
        """Return whether it has the Lease."""
        return self.metric("rlhf_operator_leader") == 1

    @property
    def pid(self) -> int:
        """Return the pid of the running process."""
        self.check()
        assert self._process is not None
        return self._process.pid

    @property
    def metrics_address(self) -> str:
        """Return host and port of /metrics."""
        return self._metrics

    def check(self) -> None:
        """Restart it if it lost its Lease; raise if it has ended by itself for another reason."""
        if self.runs():
            return
        if self._process is None or LEASE_LOST not in self._last_words():
            raise AssertionError(f"the operator has ended\n{tail(self.log)}")
        self._run()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code; 0 if it was not started or is stopped."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            return process.wait(STOP_TIMEOUT)
        finally:
            process.kill()

    def upgrade(self, *arguments: str) -> None:
        """End it, and start it with other arguments, like a rollout of its Deployment."""
        self.stop()
        self._arguments = arguments
        self.start()

    def kill(self) -> None:
        """Kill it, like the death of its node."""
        self.stop(signal.SIGKILL)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum over the series of a metric with these labels; 0 while it does not answer."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self._page(f"http://{self._metrics}/metrics"))
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def healthy(self) -> bool:
        """Return whether /healthz is ok."""
        return self._page(f"http://{self._health}/healthz") == "ok"

    def ready(self) -> str:
        """Return the answer of /readyz; empty if there is none."""
        return self._page(f"http://{self._health}/readyz")

    def _last_words(self) -> str:
        """Return the output since its start."""
        with self.log.open("rb") as log:
            log.seek(self._said)
            return log.read().decode(errors="replace")

    def _page(self, url: str) -> str:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as refusal:
            return refusal.read().decode()
        except OSError:
            return ""
