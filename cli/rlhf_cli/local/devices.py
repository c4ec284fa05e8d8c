"""Which CPU cores and CUDA devices each process of a local run gets.

Rule: pure given the machine. Stages of an iteration mostly alternate, so when a machine has too few devices for all
groups at once, groups share them, but the members of one group never do. Cores are pinned only when every process can
have its own: an overlapping pin is worse than the kernel's balancing.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_api.names import Group
from rlhf_cli.local.errors import RunError


@dataclass(frozen=True)
class LocalMachine:
    """What this machine has to give."""

    cores: tuple[int, ...]
    """Cores this process may run on."""
    gpus: tuple[str, ...] = ()
    """CUDA devices, as CUDA_VISIBLE_DEVICES names them."""


@dataclass(frozen=True)
class DeviceDemand:
    """What one process needs."""

    name: str
    group: Group
    threads: int
    gpus: int


@dataclass(frozen=True)
class DeviceShare:
    """What one process got."""

    cores: frozenset[int] | None = None
    """None: not pinned."""
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceAllotment:
    """Shares by process name, and what a user should know about them."""

    shares: Mapping[str, DeviceShare]
    notes: tuple[str, ...] = field(default=())


def allot_devices(demands: Sequence[DeviceDemand], machine: LocalMachine) -> DeviceAllotment:
    """Shares for all processes. Raises RunError when one group alone needs more CUDA devices than there are."""
    notes: list[str] = []
    cores = _allot_cores(demands, machine, notes)
    gpus = _allot_gpus(demands, machine, notes)
    return DeviceAllotment({d.name: DeviceShare(cores.get(d.name), gpus[d.name]) for d in demands}, tuple(notes))


def _allot_cores(demands: Sequence[DeviceDemand], machine: LocalMachine, notes: list[str]) -> dict[str, frozenset[int]]:
    workers = [demand for demand in demands if demand.group is not Group.COORDINATOR]
    threads = sum(demand.threads for demand in workers)
    # One core is left to the coordinator and to this command.
    if threads >= len(machine.cores):
        notes.append(f"{threads} compute threads share {len(machine.cores)} cores")
        return {}
    free = iter(machine.cores)
    return {demand.name: frozenset(next(free) for _ in range(demand.threads)) for demand in workers}


def _allot_gpus(demands: Sequence[DeviceDemand], machine: LocalMachine, notes: list[str]) -> dict[str, tuple[str, ...]]:
    shared = sum(demand.gpus for demand in demands) > len(machine.gpus)
    taken = 0
    group: Group | None = None
    shares = {}
    for demand in demands:
        if shared and demand.group is not group:
            group, taken = demand.group, 0
            needed = sum(other.gpus for other in demands if other.group is group)
            if needed > len(machine.gpus):
                raise RunError(
                    f"spec.{group}.gpusPerReplica: {demand.gpus}: the group needs {needed} CUDA devices, "
                    f"this machine has {len(machine.gpus)}; use fewer workers, or 0 to run on CPU"
                )
        shares[demand.name] = machine.gpus[taken : taken + demand.gpus]
        taken += demand.gpus
    if shared:
        notes.append(f"groups share {len(machine.gpus)} CUDA devices; their models are in memory at the same time")
    return shares


def this_machine() -> LocalMachine:
    """Cores of this process's affinity mask; CUDA devices of CUDA_VISIBLE_DEVICES or else of nvidia-smi."""
    return LocalMachine(tuple(sorted(os.sched_getaffinity(0))), _cuda_devices())


def _cuda_devices() -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(device.strip() for device in visible.split(",") if device.strip() and device.strip() != "-1")
    try:
        listed = subprocess.run(  # fixed command, no input
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in listed.stdout.splitlines() if line.strip())
