"""Which way tensors go between the ranks of a group: decided by what every rank says of its device when they meet.

NCCL refuses two ranks on one GPU, so a group that has such a pair sends everything through host memory, over gloo. The
physical devices are compared, by UUID and by PCI address on one host, never by index: CUDA_VISIBLE_DEVICES renumbers
devices, and slices of one GPU have a UUID each but one PCI address, by which NCCL judges.

Rule: all ranks decide from the same statements in the same order, so all decide alike without a word. What a rank says
came over the network: it is bounded and checked, and one that says nothing readable shares a device with nobody.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

import torch
import torch.distributed as dist

TransportKind = Literal["gloo", "nccl", "host"]
TRANSPORTS: Final[tuple[TransportKind, ...]] = get_args(TransportKind)
"""In the order of their number in the metric `training/transport`."""
STATEMENT_BYTES: Final = 4096
"""Of one rank; a real one has less than 300."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""The same in all containers of one host, and in no two hosts."""


@dataclass(frozen=True)
class RankDevice:
    """What a rank says of its device."""

    kind: str
    """`cpu` or `cuda`."""
    names: frozenset[str] = frozenset()
    """Names of the physical device; ranks with one in common are on the same one."""
    nccl: bool = False
    """NCCL is there."""

    def statement(self) -> bytes:
        """Return it as what the other ranks read."""
        return json.dumps({"kind": self.kind, "names": sorted(self.names), "nccl": self.nccl}).encode()


@dataclass(frozen=True)
class GroupTransport:
    """How a group speaks, as one of its ranks sees it."""

    kind: TransportKind
    sharers: int = 1
    """Ranks on this rank's device, itself included."""
    reason: str = ""
    """Why tensors go through host memory; empty when they do not."""


def describe(device: torch.device) -> RankDevice:
    """Return what this rank says of its device."""
    if device.type != "cuda":
        return RankDevice(device.type)
    properties = torch.cuda.get_device_properties(device)
    names = {f"uuid {properties.uuid}"}
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in address and BOOT_ID.is_file():
        names.add(f"pci {BOOT_ID.read_text().strip()} {address}")
    return RankDevice("cuda", frozenset(names), dist.is_nccl_available())


def read_statement(statement: bytes) -> RankDevice | None:
    """Return what a rank said; None when it is nothing readable, such as that of an older version."""
    if len(statement) > STATEMENT_BYTES:
        return None
    try:
        content = json.loads(statement)
        return RankDevice(str(content["kind"]), frozenset(map(str, content["names"])), content["nccl"] is True)
    except (ValueError, KeyError, TypeError):
        return None


def choose_transport(devices: Sequence[RankDevice | None], rank: int) -> GroupTransport:
    """Return how the group of these devices (by rank) speaks, as `rank` sees it."""
    known = {index: device for index, device in enumerate(devices) if device is not None}
    gpus = [index for index, device in known.items() if device.kind == "cuda"]
    if not gpus:
        return GroupTransport("gloo")
    shared = {
        index: [other for other in gpus if known[other].names & known[index].names or other == index] for index in gpus
    }
    sharers = len(shared.get(rank, [rank]))
    crowd = next((ranks for ranks in shared.values() if len(ranks) > 1), None)
    others = [index for index in known if index not in gpus]
    without = [index for index in gpus if not known[index].nccl]
    if crowd is not None:
        reason = f"ranks {_listed(crowd)} are on one GPU, which NCCL refuses"
    elif others:
        reason = f"ranks {_listed(others)} have no GPU, which NCCL needs"
    elif without:
        reason = f"ranks {_listed(without)} have no NCCL"
    else:
        return GroupTransport("nccl", sharers)
    return GroupTransport("host", sharers, reason)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
