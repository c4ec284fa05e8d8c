"""One slot per running cluster: the number from which every port, subnet, link name and folder of an instance follows.

Owns the folder /tmp/rlhf-cluster-<uid>: `slot-N.lock`, locked with flock for the life of the owner, and `N/`, the
instance's folder with its state file. The kernel releases the lock whenever the owner dies, so a free lock beside a
state file means a crashed run. Rule: names are written to the state file before the resource exists. It must never
assign a slot whose leftovers are not removed.
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
FIRST_PORT = 21000  # below 32768, where Linux's ephemeral ports begin
PORTS_PER_SLOT = 10


@dataclass(frozen=True)
class Addresses:
    """All addresses and names of slot `slot`, without collisions between slots."""

    slot: int

    def port(self, index: int) -> int:
        """Return the slot's `index`-th TCP port on loopback."""
        if not 0 <= index < PORTS_PER_SLOT:
            raise ValueError(f"index: {index}: a slot has ports 0 to {PORTS_PER_SLOT - 1}")
        return FIRST_PORT + self.slot * PORTS_PER_SLOT + index

    @property
    def bridge(self) -> str:
        """Return the name of the bridge that joins host and nodes."""
        return f"rlhfc{self.slot}"

    @property
    def links(self) -> ipaddress.IPv4Network:
        """Return the subnet of that bridge."""
        return ipaddress.IPv4Network(f"10.201.{self.slot}.0/24")

    @property
    def host(self) -> str:
        """Return the host's address on the bridge, where API server and DNS listen."""
        return str(self.links[1])

    @property
    def services(self) -> ipaddress.IPv4Network:
        """Return the subnet of service addresses."""
        return ipaddress.IPv4Network(f"10.203.{self.slot}.0/24")

    @property
    def all_pods(self) -> ipaddress.IPv4Network:
        """Return the subnet of the pods of all nodes."""
        return ipaddress.IPv4Network(f"10.202.{self.slot * NODES_PER_SLOT}.0/21")

    def pods(self, node: int) -> ipaddress.IPv4Network:
        """Return the subnet of the pods of node `node` (from 0)."""
        return list(self.all_pods.subnets(new_prefix=24))[node]

    def node(self, node: int) -> str:
        """Return the address of node `node` (from 0) on the bridge."""
        return str(self.links[11 + node])

    def veth(self, node: int) -> str:
        """Return the host end of the cable to node `node`."""
        return f"rlhfc{self.slot}n{node}"

    def cgroup(self, node: int) -> str:
        """Return the name of the control group, in every hierarchy, above the pods of node `node`."""
        return f"rlhf-cluster-{self.slot}-n{node}"


@dataclass
class State:
    """Resources that an instance has created on the machine outside its own folder; JSON on disk."""

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
        """Return the state in `path`; None if there is none or the owner died before its first write was complete."""
        try:
            raw = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        raw["processes"] = [(pid, started) for pid, started in raw["processes"]]
        return cls(**raw)

    def write(self, path: Path) -> None:
        """Replace `path` atomically."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)


class Slot:
    """A slot locked by this process, with its folder and its state file."""

    def __init__(self, root: Path, number: int, lock: int) -> None:
        self.root = root
        self.number = number
        self.addresses = Addresses(number)
        self.folder = root / str(number)
        self._lock = lock
        self.state = State(boot=boot_id())

    @property
    def state_file(self) -> Path:
        """Return the path of the state file."""
        return self.folder / "state.json"

    def record(
        self, *, process: tuple[int, int] | None = None, link: str | None = None, cgroup: str | None = None
    ) -> None:
        """Record one more resource that a clean-up must remove."""
        self.state.processes += [process] if process else []
        self.state.links += [link] if link else []
        self.state.cgroups += [cgroup] if cgroup else []
        self.state.write(self.state_file)

    def leave(self) -> None:
        """Release the lock and leave everything in place for a sweep."""
        os.close(self._lock)

    def release(self) -> None:
        """Release the slot; its folder must already be deleted."""
        with contextlib.suppress(FileNotFoundError):
            lock_path(self.root, self.number).unlink()
        os.close(self._lock)
        with contextlib.suppress(OSError):
            self.root.rmdir()


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def slots_root() -> Path:
    """Return the folder of this user's clusters; short, since Unix socket paths end at 107 bytes."""
    return Path(os.environ.get("RLHF_CLUSTER_ROOT", f"/tmp/rlhf-cluster-{os.getuid()}"))


def lock_path(root: Path, number: int) -> Path:
    """Return the lock file of slot `number`."""
    return root / f"slot-{number}.lock"


def try_lock(root: Path, number: int) -> Slot | None:
    """Lock slot `number` and return it; None if a living process has it."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{root} belongs to user {root.stat().st_uid}, not to {os.getuid()}; set RLHF_CLUSTER_ROOT"
        )
    path = lock_path(root, number)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:  # the last owner of any slot has just removed the root
        return try_lock(root, number)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_ino == path.stat().st_ino:
            return Slot(root, number, lock)
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)  # locked by another, or unlinked between our open and our lock
    return None


def ports_free(addresses: Addresses) -> bool:
    """Return whether all ports of the slot are free."""
    for index in range(PORTS_PER_SLOT):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", addresses.port(index)))
            except OSError:
                return False
    return True
