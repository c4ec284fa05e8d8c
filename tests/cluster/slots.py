"""One slot per running cluster: the number from which every port, subnet, link name and folder of an instance follows.

Owns the folder /tmp/rlhf-cluster-<uid>: `slot-N.lock`, held with flock for the life of the owner, and `N/`, the
instance's folder with its state file. The kernel drops the lock when the owner dies, however it dies, so a free lock
beside a state file means a crashed run. The rule: names go into the state file before the thing exists. It must never
hand out a slot whose leftovers are not removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

SLOTS = 32  # bounds the subnets below: 32 slots of 8 nodes with 254 pods each fill one /16
NODES_PER_SLOT = 8
FIRST_PORT = 21000  # below 32768, where Linux begins to hand out ephemeral ports
PORTS_PER_SLOT = 10


@dataclass(frozen=True)
class Addresses:
    """Everything numeric of slot `slot`, without a collision between slots."""

    slot: int

    def port(self, index: int) -> int:
        """The slot's `index`-th TCP port on loopback."""
        if not 0 <= index < PORTS_PER_SLOT:
            raise ValueError(f"index: {index}: a slot has ports 0 to {PORTS_PER_SLOT - 1}")
        return FIRST_PORT + self.slot * PORTS_PER_SLOT + index

    @property
    def bridge(self) -> str:
        """Name of the bridge that joins host and nodes."""
        return f"rlhfc{self.slot}"

    @property
    def links(self) -> ipaddress.IPv4Network:
        """Subnet of that bridge."""
        return ipaddress.IPv4Network(f"10.201.{self.slot}.0/24")

    @property
    def host(self) -> str:
        """The host's address on the bridge: API server and DNS listen here."""
        return str(self.links[1])

    @property
    def services(self) -> ipaddress.IPv4Network:
        """Subnet of service addresses."""
        return ipaddress.IPv4Network(f"10.203.{self.slot}.0/24")

    @property
    def all_pods(self) -> ipaddress.IPv4Network:
        """Subnet of the pods of all nodes."""
        return ipaddress.IPv4Network(f"10.202.{self.slot * NODES_PER_SLOT}.0/21")

    def pods(self, node: int) -> ipaddress.IPv4Network:
        """Subnet of the pods of node `node` (from 0)."""
        return list(self.all_pods.subnets(new_prefix=24))[node]

    def node(self, node: int) -> str:
        """Address of node `node` (from 0) on the bridge."""
        return str(self.links[11 + node])

    def veth(self, node: int) -> str:
        """Host end of the cable to node `node`."""
        return f"rlhfc{self.slot}n{node}"

    def cgroup(self, node: int) -> str:
        """Name of the control group, in every hierarchy, above the pods of node `node`."""
        return f"rlhf-cluster-{self.slot}-n{node}"


@dataclass
class State:
    """What an instance has made on the machine outside its own folder; JSON on disk."""

    boot: str
    """Boot id of the kernel; process ids of another boot mean nothing."""
    processes: list[tuple[int, int]] = field(default_factory=list)
    """(pid, start time in clock ticks since boot), so that a reused pid is never mistaken for ours."""
    links: list[str] = field(default_factory=list)
    """Network links by name."""
    cgroups: list[str] = field(default_factory=list)
    """Control groups by name, relative to the root of every hierarchy."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The state in `path`; None when there is none or the owner died before its first write was complete."""
        try:
            raw = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        raw["processes"] = [(pid, started) for pid, started in raw["processes"]]
        return cls(**raw)

    def write(self, path: Path) -> None:
        """Replace `path` in one step."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)


class Slot:
    """A slot held by this process, with its folder and its state file."""

    def __init__(self, root: Path, number: int, lock: int) -> None:
        self.root = root
        self.number = number
        self.addresses = Addresses(number)
        self.folder = root / str(number)
        self._lock = lock
        self.state = State(boot=boot_id())

    @property
    def state_file(self) -> Path:
        """Where the state lies."""
        return self.folder / "state.json"

    def record(
        self, *, process: tuple[int, int] | None = None, link: str | None = None, cgroup: str | None = None
    ) -> None:
        """Write down one more thing that a clean-up must remove."""
        self.state.processes += [process] if process else []
        self.state.links += [link] if link else []
        self.state.cgroups += [cgroup] if cgroup else []
        self.state.write(self.state_file)

    def leave(self) -> None:
        """Let go of the lock and leave everything in place for a sweep."""
        os.close(self._lock)

    def release(self) -> None:
        """Give the slot back; its folder must be gone already."""
        with contextlib.suppress(FileNotFoundError):
            lock_path(self.root, self.number).unlink()
        os.close(self._lock)
        with contextlib.suppress(OSError):
            self.root.rmdir()


def boot_id() -> str:
    """The kernel's name for this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def slots_root() -> Path:
    """The folder of this user's clusters, the same for every run; short, since Unix socket paths end at 107 bytes."""
    return Path(os.environ.get("RLHF_CLUSTER_ROOT", f"/tmp/rlhf-cluster-{os.getuid()}"))


def lock_path(root: Path, number: int) -> Path:
    """The lock file of slot `number`."""
    return root / f"slot-{number}.lock"


def try_lock(root: Path, number: int) -> Slot | None:
    """Take slot `number` unless a living process has it."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{root} belongs to user {root.stat().st_uid}, not to {os.getuid()}; set RLHF_CLUSTER_ROOT"
        )
    path = lock_path(root, number)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:  # the last holder of any slot has just removed the root
        return try_lock(root, number)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_ino == path.stat().st_ino:
            return Slot(root, number, lock)
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)  # held by another, or unlinked between our open and our lock
    return None


def ports_free(addresses: Addresses) -> bool:
    """True when nothing listens on any port of the slot."""
    for index in range(PORTS_PER_SLOT):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", addresses.port(index)))
            except OSError:
                return False
    return True
