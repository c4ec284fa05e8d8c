"""The traces of a cluster on the machine: recorded before and after, so that a test can assert that nothing is left.

Reads only. Everything is looked up on the machine, never in the cluster's own records, because an incomplete record
must not hide a leftover.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, fields
from pathlib import Path

from tests.cluster.leftovers import cgroup_hierarchies
from tests.cluster.node import KERNEL_SETTINGS

# Default folders of Kubernetes, containerd and CNI plugins.
WATCHED_FOLDERS = (
    "/etc/cni/net.d",
    "/etc/kubernetes",
    "/opt",
    "/run",
    "/run/containerd",
    "/run/netns",
    "/usr/libexec",
    "/var/lib",
    "/var/lib/cni",
    "/var/lib/containers",
    "/var/log",
)


@dataclass(frozen=True)
class Machine:
    """Sets of names; the difference of two instances is what was added in between."""

    mounts: frozenset[str]
    links: frozenset[str]
    routes: frozenset[str]
    rules: frozenset[str]
    cgroups: frozenset[str]
    files: frozenset[str]
    kernel_settings: frozenset[str]

    @classmethod
    def now(cls) -> Machine:
        """Return the present state of the machine."""
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        forwarding = Path("/proc/sys/net/ipv4/ip_forward").read_text()
        settings = [f"{name}={Path('/proc/sys', name).read_text().strip()}" for name in KERNEL_SETTINGS]
        return cls(
            mounts=frozenset(mounts),
            links=frozenset(path.name for path in Path("/sys/class/net").iterdir()),
            routes=frozenset(_lines("ip", "route", "show", "table", "all")),
            rules=frozenset(line for tool in ("iptables", "iptables-legacy") for line in packet_rules(tool)),
            cgroups=frozenset(str(path) for top in cgroup_hierarchies() for path in top.glob("rlhf-cluster-*")),
            files=frozenset(str(path) for folder in WATCHED_FOLDERS for path in Path(folder).glob("*")),
            kernel_settings=frozenset([*settings, f"ip_forward={forwarding.strip()}"]),
        )

    def left_since(self, before: Machine) -> dict[str, list[str]]:
        """Return what was added since `before`, by kind; empty if nothing was."""
        pairs = {field.name: sorted(getattr(self, field.name) - getattr(before, field.name)) for field in fields(self)}
        return {name: more for name, more in pairs.items() if more}


def packet_rules(tool: str) -> list[str]:
    """Return the chains and rules of the machine's own network namespace, without counters."""
    return [line.split(" [")[0] for line in _lines(f"{tool}-save") if line.startswith((":", "-A"))]


def processes_of(folder: Path, cgroup: str) -> dict[int, str]:
    """Return pid -> command line of processes that name the instance's folder or are below its control group."""
    result = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            groups = (process / "cgroup").read_text()
        except OSError:
            continue
        if command and (f"{folder}/" in f"{command} " or f"/{cgroup}" in groups):
            result[int(process.name)] = command
    return result


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
