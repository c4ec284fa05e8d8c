"""Whose turn it is on a worker's device where a training rank shares it with what decodes and scores.

Rule: the two sides never have device memory at once. A command of one side first puts the roles of the other to sleep,
so the bound holds whatever the coordinator asks for and in whatever order; within a side roles share as they always
did. A role that takes weights where it sleeps is given them while the rank that trained them is still on the device,
which converts and copies them many times faster than the host would; what is lent of them there is freed before the
next turn, and goes through host memory where there is no room. A sample that is still held when training begins is none
the coordinator counts on, and is dropped. Called by the compute thread alone. When the process dies here the weights
are those of the last checkpoint, as in any death.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_workers.worker_role import LoadsWhileOffloaded, Outbox, WorkerRole

log = logging.getLogger(__name__)

NEED_NO_DEVICE: Final = frozenset({"save_checkpoint", "withdraw", "offload"})
"""Commands that a sleeping role obeys as well: what they read may lie in host memory."""


class DeviceArbiter:
    """Turns of the roles of one worker."""

    def __init__(
        self,
        roles: Mapping[str, WorkerRole],
        clock_ns: Callable[[], int] = time.time_ns,
        unused: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`roles` is looked at anew at every command; `unused` are the bytes of the device that no process has, where
        there are such."""
        self._roles = roles
        self._unused = unused
        self._clock_ns = clock_ns
        self._training: bool | None = None
        """Whose turn it is; None: nobody's yet."""

    def begin(self, role: str, command: str, outbox: Outbox) -> None:
        """Before a command of `role`: the other side sleeps."""
        training = role == Group.TRAINING
        if training == self._training or command in NEED_NO_DEVICE:
            return
        sleeper = self._roles.get(role)
        if command == "load_weights" and isinstance(sleeper, LoadsWhileOffloaded) and sleeper.loads_while_offloaded:
            return
        for other in self._roles.values():
            if (other.name == Group.TRAINING) != training:
                self._offload(other, outbox)
        self._training = training

    def _offload(self, role: WorkerRole, outbox: Outbox) -> None:
        start_ns, before = self._clock_ns(), self._unused()
        dropped = role.give_back()
        if dropped:
            log.warning("%d samples that nobody waits for are dropped: training begins", len(dropped))
        role.offload()
        end_ns, after = self._clock_ns(), self._unused()
        measured = {} if before is None or after is None else {"freed": str(after - before), "unused": str(after)}
        if measured:
            log.info("%s is offloaded: %s bytes of the device freed, %s unused", role.name, *measured.values())
        outbox.span(f"offload/{role.name}", start_ns, end_ns, 0, **measured)
        offload = pb.OffloadObservation(role=role.name)
        outbox.observe(pb.Observation(start_ns=start_ns, end_ns=end_ns, offload=offload))
