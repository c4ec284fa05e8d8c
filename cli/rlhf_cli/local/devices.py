"""The CPU cores and CUDA devices of each process of a local run. Pure, except `this_machine`.

Rule: groups share devices where a machine has too few.
"""

import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_cli.local.errors import RunError
from rlhf_common.names import Group


@dataclass(frozen=True)
class LocalMachine:
    """Devices of this machine."""

    cores: tuple[int, ...]
    """Cores on which this process may run."""
    gpus: tuple[str, ...] = ()
    """CUDA devices, named as in CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True)
class DeviceDemand:
    """Devices that one process, or the ranks of one pod, need."""

    name: str
    group: Group
    threads: int
    gpus: int
    processes: int = 1
    """Number of processes among which the devices are divided: the ranks of one pod."""


@dataclass(frozen=True)
class DeviceShare:
    """Devices that one process gets."""

    cores: frozenset[int] | None = None
    """Cores to which the process is pinned; None for any."""
    gpus: tuple[str, ...] = ()
    """CUDA devices; a device that several ranks of the pod share is listed once for each."""
    sharers: int = 1
    """Number of processes on the busiest of its CUDA devices, itself included."""


@dataclass(frozen=True)
class DeviceAllotment:
    """Devices of all processes by name, and notes for the user."""

    shares: Mapping[str, DeviceShare]
    notes: tuple[str, ...] = field(default=())


def allot_devices(demands: Sequence[DeviceDemand], machine: LocalMachine) -> DeviceAllotment:
    """Return the devices of all processes. Raises RunError when one process needs more CUDA devices than there are."""
    notes: list[str] = []
    cores = _allot_cores(demands, machine, notes)
    gpus = _allot_gpus(demands, machine, notes)
    users = Counter(gpu for each in gpus.values() for gpu in each)
    sharers = {name: max((users[gpu] for gpu in each), default=1) for name, each in gpus.items()}
    shares = {d.name: DeviceShare(cores.get(d.name), gpus[d.name], sharers[d.name]) for d in demands}
    return DeviceAllotment(shares, tuple(notes))


def _allot_cores(demands: Sequence[DeviceDemand], machine: LocalMachine, notes: list[str]) -> dict[str, frozenset[int]]:
    workers = [demand for demand in demands if demand.group is not Group.COORDINATOR]
    threads = sum(demand.threads for demand in workers)
    # One core is left for the coordinator and this command.
    if threads >= len(machine.cores):
        notes.append(f"{threads} compute threads share {len(machine.cores)} cores")
        return {}
    free = iter(machine.cores)
    pinned = (demand for demand in workers if not demand.gpus)
    return {demand.name: frozenset(next(free) for _ in range(demand.threads)) for demand in pinned}


def _allot_gpus(demands: Sequence[DeviceDemand], machine: LocalMachine, notes: list[str]) -> dict[str, tuple[str, ...]]:
    present = len(machine.gpus)
    shared = sum(demand.gpus for demand in demands) > present
    taken = 0
    group: Group | None = None
    shares = {}
    for demand in demands:
        if shared and demand.group is not group:
            group, taken = demand.group, 0
            needed = sum(other.gpus for other in demands if other.group is group)
            if demand.gpus // demand.processes <= present < needed:
                notes.append(f"{group}: processes that need {needed} CUDA devices share {present}")
        if (each := demand.gpus // demand.processes) > present:
            raise RunError(
                f"spec.{demand.group}.gpusPerReplica: {each}: this machine has {present} CUDA devices; "
                f"ask for fewer, or 0 to run on CPU"
            )
        # Start again with the first device where one group has more processes than there are devices.
        shares[demand.name] = tuple(machine.gpus[(taken + number) % present] for number in range(demand.gpus))
        taken += demand.gpus
    if shared:
        notes.append(f"groups share {present} CUDA devices; their models are in memory at the same time")
    return shares


def this_machine() -> LocalMachine:
    """Return the cores of this process's affinity mask, and the CUDA devices of CUDA_VISIBLE_DEVICES or nvidia-smi."""
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
