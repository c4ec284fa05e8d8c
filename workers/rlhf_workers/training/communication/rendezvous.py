"""Forms a group of ranks: they meet at rank 0's TCPStore, each describes its device, and torch.distributed starts.

Rule: keys contain the group epoch, so ranks of groups with different epochs do not meet.
"""

import ipaddress
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.training.communication.transport import GroupTransport, choose_transport, describe, read_statement

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.02
"""Seconds between two checks for arrived ranks."""
SILENCE: Final = timedelta(minutes=30)
"""Time-out of the group's transfers and sums."""


def join_group(
    command: pb.BecomeTraining, device: torch.device, timeout: float, clock: Callable[[], float] = time.monotonic
) -> GroupTransport:
    """Initialise the default process group and return its transport (`choose_transport`).

    Raises WorkError RendezvousTimeout, AddressInUse, BadCommand. `timeout` in seconds covers the arrival of all ranks.
    """
    host, port = split_address(command.rendezvous)
    if _is_loopback(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # by default gloo binds the address of the host's name
    deadline = clock() + timeout
    store = _store(command, host, port, timeout)
    statements = _meet(store, command, describe(device).statement(), deadline, clock)
    transport = choose_transport([read_statement(statement) for statement in statements], command.rank)
    if transport.reason:
        log.warning("training transfers go through host memory: %s", transport.reason)
    nccl = transport.kind == "nccl"
    if nccl:
        # Transfers of a rank run one after the other on purpose, so this warning is not needed.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    prefix = PrefixStore(f"group-{command.group_epoch}", store)
    try:
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            store=prefix,
            rank=command.rank,
            world_size=command.world_size,
            timeout=SILENCE,
            device_id=device if nccl else None,  # connects now, while all ranks are here
        )
    except RuntimeError as error:
        raise _timeout(command, [], str(error)) from error
    return transport


def leave_group() -> None:
    """End the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of host:port, the brackets of an IPv6 host removed. Raises WorkError BadCommand."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise WorkError("BadCommand", f"becomeTraining.rendezvous: {address!r} is not host:port")
    return host.strip("[]"), int(port)


def _store(command: pb.BecomeTraining, host: str, port: int, timeout: float) -> TCPStore:
    try:
        return TCPStore(
            host,
            port,
            command.world_size,
            is_master=command.rank == 0,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        if command.rank == 0:
            raise WorkError(
                "AddressInUse",
                f"rank 0 cannot listen at {command.rendezvous}: {_first_line(error)}",
                retryable=True,
                exit_code=ExitCode.ADDRESS_IN_USE,
            ) from error
        raise _timeout(command, [0], _first_line(error)) from error


def _meet(
    store: TCPStore, command: pb.BecomeTraining, statement: bytes, deadline: float, clock: Callable[[], float]
) -> list[bytes]:
    """Announce this rank, and return the device statements of all ranks once they have arrived."""

    def key(rank: int) -> str:
        return f"joined-{command.group_epoch}-{rank}"

    missing = [rank for rank in range(command.world_size) if rank != command.rank]
    try:
        store.set(key(command.rank), statement.decode())
        while missing := [rank for rank in missing if not store.check([key(rank)])]:
            if clock() > deadline:
                raise _timeout(command, missing, "")
            time.sleep(POLL_SECONDS)
        return [bytes(store.get(key(rank))) for rank in range(command.world_size)]
    except RuntimeError as error:
        raise _timeout(command, [0], _first_line(error)) from error


def _timeout(command: pb.BecomeTraining, missing: list[int], why: str) -> WorkError:
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else "all ranks"
    message = f"training group epoch {command.group_epoch}: rank {command.rank} waited for {ranks} of "
    message += f"{command.world_size} at {command.rendezvous}" + (f": {why}" if why else "")
    return WorkError("RendezvousTimeout", message, retryable=True, exit_code=ExitCode.RESTART)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
