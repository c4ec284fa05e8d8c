"""Operators maintained as by a Deployment: one that ends by itself is restarted, and that is counted."""

from __future__ import annotations

import signal
from types import TracebackType
from typing import Any, Self

from tests.cluster.cluster import Cluster
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.releases.chart import HOME, RELEASE


class InstalledOperator:
    """The operator of the installed release, which its Deployment maintains."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._where = cluster, f"--namespace={HOME}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    @property
    def log(self) -> str:
        """Return the log of its pod or pods."""
        return self._cluster.kubectl("logs", f"deployment/{RELEASE}", "--all-pods", "--tail=-1", self._where)

    @property
    def ended(self) -> int:
        """Return how often its container ended by itself."""
        statuses = [status for pod in self._pods() for status in pod["status"].get("containerStatuses", [])]
        return sum(int(status["restartCount"]) for status in statuses)

    def leads(self) -> bool:
        """Return whether a pod of the release has the Lease."""
        holder = self._cluster.kubectl("get", "lease", "--output=jsonpath={.items[*].spec.holderIdentity}", self._where)
        return any(holder.startswith(f"{pod['metadata']['name']}_") for pod in self._pods())

    def keep(self) -> None:
        """Do nothing: the kubelet restarts it."""

    def _pods(self) -> list[dict[str, Any]]:
        return list(self._cluster.get("pods", self._where)["items"])


class Operators:
    """The active operator, and at times a standby beside it."""

    def __init__(self, cluster: Cluster, image: str) -> None:
        self._cluster, self._arguments = cluster, (f"--coordinator-image={image}", f"--worker-image={image}")
        self._running: list[OperatorProcess] = []
        self.ended = 0
        """How often an operator ended by itself, for instance because it could not renew its Lease in time."""

    def __enter__(self) -> Self:
        self.add()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for item in self._running:
            item.stop()

    @property
    def log(self) -> str:
        """Return the logs of all of them."""
        return self._running[0].log.read_text(errors="replace")

    def add(self) -> OperatorProcess:
        """Start one more; it waits for the Lease if another has it."""
        process = OperatorProcess(self._cluster, *self._arguments)
        process.launch()
        self._running.append(process)
        return process

    def end(self, name: str) -> None:
        """End the leader, or the oldest if none leads, with the signal of this name."""
        leader = next((item for item in self._running if item.leads()), self._running[0])
        self._running.remove(leader)
        leader.stop(signal.Signals[name])

    def leads(self) -> bool:
        """Return whether one of them leads."""
        return any(item.leads() for item in self._running)

    def keep(self) -> None:
        """Restart those that have ended by themselves."""
        for process in self._running:
            if not process.runs():
                self.ended += 1
                process.launch()
