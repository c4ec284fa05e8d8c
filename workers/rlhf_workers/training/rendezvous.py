"""How ranks become a group: they meet at rank 0's TCPStore, each says it is there, then torch.distributed starts.

Rule: a wait ends with a message that names the missing ranks. A group lives as long as its processes; when one is
lost all ranks restart and meet again under a higher group epoch and at a fresh address, so nothing of an old group
can be met here.
"""

import ipaddress
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rlhf_api import control_pb2 as pb
from rlhf_api.names import ExitCode
from rlhf_workers.failures import WorkError

POLL_SECONDS: Final = 0.02
"""Between two looks at who has come; a look is one small message."""
SILENCE: Final = timedelta(minutes=30)
"""A transfer or sum may wait this long for a peer that is alive but slow; a dead one is noticed at once."""


def join_group(
    command: pb.BecomeTraining, device: torch.device, timeout: float, clock: Callable[[], float] = time.monotonic
) -> None:
    """Initialise the default process group: NCCL on CUDA, else gloo. WorkError RendezvousTimeout, AddressInUse.

    `timeout` in seconds covers meeting all ranks.
    """
    host, port = split_address(command.rendezvous)
    if _is_loopback(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo else binds what the host's name resolves to
    deadline = clock() + timeout
    store = _store(command, host, port, timeout)
    _meet(store, command, deadline, clock)
    backend = "nccl" if device.type == "cuda" else "gloo"
    prefix = PrefixStore(f"group-{command.group_epoch}", store)
    try:
        dist.init_process_group(
            backend,
            store=prefix,
            rank=command.rank,
            world_size=command.world_size,
            timeout=SILENCE,
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        raise _timeout(command, [], str(error)) from error


def leave_group() -> None:
    """End the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of host:port, IPv6 hosts in brackets."""
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


def _meet(store: TCPStore, command: pb.BecomeTraining, deadline: float, clock: Callable[[], float]) -> None:
    def key(rank: int) -> str:
        return f"joined-{command.group_epoch}-{rank}"

    missing = [rank for rank in range(command.world_size) if rank != command.rank]
    try:
        store.set(key(command.rank), "1")
        while missing := [rank for rank in missing if not store.check([key(rank)])]:
            if clock() > deadline:
                raise _timeout(command, missing, "")
            time.sleep(POLL_SECONDS)
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
