"""Turns on a worker's device, when a training rank shares it with roles that decode and score.

Rule: a command of one side first puts the roles of the other to sleep, unless it needs no device; the samples of these
roles are dropped.
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
"""Commands that a sleeping role also executes, so no other role needs to sleep for them."""


class DeviceArbiter:
    """Device turns of the roles of one worker."""

    def __init__(
        self,
        roles: Mapping[str, WorkerRole],
        clock_ns: Callable[[], int] = time.time_ns,
        unused: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`roles` is read anew for every command; `unused` returns the device bytes that no process uses, or None."""
        self._roles = roles
        self._unused = unused
        self._clock_ns = clock_ns
        self._training: bool | None = None
        """Whether training has the turn; None: no side has had it yet."""

    def begin(self, role: str, command: str, outbox: Outbox) -> None:
        """Put the other side to sleep before a command of `role`, if the command needs the device."""
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
            log.warning("%d samples that no command waits for are dropped: training begins", len(dropped))
        role.offload()
        end_ns, after = self._clock_ns(), self._unused()
        measured = {} if before is None or after is None else {"freed": str(after - before), "unused": str(after)}
        if measured:
            log.info("%s is offloaded: %s bytes of the device freed, %s unused", role.name, *measured.values())
        outbox.span(f"offload/{role.name}", start_ns, end_ns, 0, **measured)
        offload = pb.OffloadObservation(role=role.name)
        outbox.observe(pb.Observation(start_ns=start_ns, end_ns=end_ns, offload=offload))
