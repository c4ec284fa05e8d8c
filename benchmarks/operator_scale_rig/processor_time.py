"""Processor time of the operator, of the cluster's processes and of the whole machine, from /proc.

Rule: read from outside, so that the measured processes are not disturbed. The operator, API server, etcd, scheduler
and fake nodes share the cores, so the time of one delays the others.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.process_tree import TICKS_A_SECOND, cpu_seconds
from tests.cluster import Cluster

OWN = {
    "kube-apiserver": "api_server",
    "etcd": "etcd",
    "kube-scheduler": "scheduler",
    "kube-controller": "controllers",
    "kwok": "fake_nodes",
}
"""Content of /proc/PID/comm, which the kernel truncates -> name in the results."""


def seconds(cluster: Cluster, operator: int | None) -> dict[str, float]:
    """Return processor time so far, by name; `client` is this process, `machine` all processes."""
    supervisor = cluster.component("kube-apiserver").supervisor.pid
    result = {"client": time.process_time(), "machine": _machine()}
    for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name in OWN:
            result[OWN[name]] = cpu_seconds(int(pid))
    if operator is not None:
        result["operator"] = cpu_seconds(operator)
    return result


def _machine() -> float:
    """Return all processors' time except idle, waiting and stolen time."""
    user, nice, system, _, _, interrupt, soft, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(map(int, (user, nice, system, interrupt, soft))) / TICKS_A_SECOND


def milliseconds_each(before: dict[str, float], after: dict[str, float], count: int) -> dict[str, float]:
    """Return the milliseconds per item of `count` items, by process."""
    return {name: round((spent - before.get(name, 0.0)) * 1000 / count, 3) for name, spent in after.items()}
