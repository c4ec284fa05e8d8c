"""Chooses the transport of tensors between the ranks of a group, from the devices that the ranks report when they meet.

NCCL rejects two ranks on one GPU, so a group with such a pair sends everything through host memory, over gloo. Physical
devices are compared by UUID and by PCI address on one host, never by index. Rule: ranks use the same statements in the
same order, so they reach the same decision.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

import torch
import torch.distributed as dist

from rlhf_common.json_document import parse_json

TransportKind = Literal["gloo", "nccl", "host"]
TRANSPORTS: Final[tuple[TransportKind, ...]] = get_args(TransportKind)
"""Transports in the order of their number in the metric `training/transport`."""
STATEMENT_BYTES: Final = 4096
"""Maximum bytes of a rank's statement."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""File whose content is equal in all containers of one host and differs between hosts."""


@dataclass(frozen=True)
class RankDevice:
    """A rank's description of its device."""

    kind: str
    """`cpu` or `cuda`."""
    names: frozenset[str] = frozenset()
    """Names of the physical device; ranks with a common name are on the same device."""
    nccl: bool = False
    """Whether NCCL is available."""

    def statement(self) -> bytes:
        """Return it as bytes for the other ranks."""
        return json.dumps({"kind": self.kind, "names": sorted(self.names), "nccl": self.nccl}).encode()


@dataclass(frozen=True)
class GroupTransport:
    """Transport of a group, from the view of one of its ranks."""

    kind: TransportKind
    sharers: int = 1
    """Number of ranks on this rank's GPU, including itself; 1 without a GPU."""
    reason: str = ""
    """Why tensors go through host memory; empty if they do not."""


def describe(device: torch.device) -> RankDevice:
    """Return the description of this rank's device."""
    if device.type != "cuda":
        return RankDevice(device.type)
    properties = torch.cuda.get_device_properties(device)
    names = {f"uuid {properties.uuid}"}
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in address and BOOT_ID.is_file():
        names.add(f"pci {BOOT_ID.read_text().strip()} {address}")
    return RankDevice("cuda", frozenset(names), dist.is_nccl_available())


def read_statement(statement: bytes) -> RankDevice | None:
    """Return the device in a rank's statement; None if it is unreadable or too long."""
    if len(statement) > STATEMENT_BYTES:
        return None
    try:
        content = parse_json(statement)
        return RankDevice(str(content["kind"]), frozenset(map(str, content["names"])), content["nccl"] is True)
    except (ValueError, KeyError, TypeError):
        return None


def choose_transport(devices: Sequence[RankDevice | None], rank: int) -> GroupTransport:
    """Return the transport of a group with these devices (by rank), from the view of `rank`."""
    present = {index: device for index, device in enumerate(devices) if device is not None}
    gpus = [index for index, device in present.items() if device.kind == "cuda"]
    if not gpus:
        return GroupTransport("gloo")
    shared = {
        index: [other for other in gpus if present[other].names & present[index].names or other == index]
        for index in gpus
    }
    sharers = len(shared.get(rank, [rank]))
    crowd = next((ranks for ranks in shared.values() if len(ranks) > 1), None)
    others = [index for index in present if index not in gpus]
    without = [index for index in gpus if not present[index].nccl]
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
