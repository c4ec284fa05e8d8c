"""What a worker can be: the seam between the agent (streams, threads, reconnecting) and the work (engines, scorers).

Rule: the agent's one compute thread calls every method of every role, so a role needs no locks; a role never touches
gRPC streams, it speaks through the Outbox. A worker may hold several roles (generation and inference) at once; the
agent steps generation first, and the others when it had nothing to do. When a session breaks, the agent calls
`give_back`, drops what the Outbox still holds except the CommandDone of a running command, and registers anew; the
coordinator sends again what it wants.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from rlhf_api import control_pb2 as pb
from rlhf_api.job import RLHFJob
from rlhf_api.names import ExitCode

if TYPE_CHECKING:
    from rlhf_workers.generation.protocol import KvSlice, Room, SampleKey


class WorkError(Exception):
    """A failure with all a user needs; becomes `pb.Failure` in CommandDone, ScoredSample, or the last log line."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        field: str = "",
        retryable: bool = False,
        exit_code: ExitCode = ExitCode.FAILED,
    ) -> None:
        super().__init__(message)
        self.failure = pb.Failure(
            reason=reason, field=field, message=message, retryable=retryable, exit_code=int(exit_code)
        )


class Outbox(Protocol):
    """Thread-safe way out to the coordinator; never blocks the compute thread."""

    def progress(self, message: pb.SampleProgress) -> None:
        """Tokens decoded since the last progress of this sample."""

    def finished(self, message: pb.FinishedSample) -> None:
        """A response is complete."""

    def scored(self, message: pb.ScoredSample) -> None:
        """One task is done (or failed, or abstained) on one sample."""

    def prefix(self, message: pb.ScoredPrefix) -> None:
        """An unfinished sample was scored as far as it goes, or is not held."""

    def done(self, message: pb.CommandDone) -> None:
        """A command is answered; commands that answer at once are answered by the agent."""

    def span(self, name: str, start_ns: int, end_ns: int, iteration: int, **attributes: str) -> None:
        """Something that took time, for the timeline."""

    def observe(self, observation: pb.Observation) -> None:
        """Report what a stretch of work took, for the cost model."""

    def count(self, tokens: int) -> None:
        """Adds to the tokens of the heartbeat."""


class Role(Protocol):
    """One role of a worker."""

    name: str
    """generation, inference or training."""

    handles: frozenset[str]
    """Names of the Command oneof this role takes, such as `generate`, `withdraw`, `load_weights`."""

    def handle(self, command: pb.Command, outbox: Outbox) -> None:
        """Takes a command and answers it by `outbox.done` exactly once, now or in a later `step`.

        A raised WorkError (or any exception: reason Internal) is answered by the agent as the command's failure.
        """

    def step(self, outbox: Outbox) -> bool:
        """One bounded piece of work (a decode step, a batch scored; well under a second). False when there is none."""

    # A role may also have `report(outbox)`: says what other threads finished, in a step in which another role worked;
    # `tensors`, which makes it a WeightProvider; and `arrivals`, a KvReceiver.

    def give_back(self) -> list[pb.SampleProgress]:
        """Drops every unfinished sample and returns it with all its tokens: the session is a new one."""

    def versions(self) -> Mapping[str, int]:
        """Model role -> weight version held."""

    def active(self) -> int:
        """Samples held, for the heartbeat."""

    def sleep(self) -> None:
        """Leaves device memory, holding no sample; its next work brings back what it needs. On a CPU nothing moves."""

    def close(self) -> None:
        """Frees devices and sockets; called once, at a clean exit."""


class WeightProvider(Protocol):
    """What a role offers to peers through the WeightSource service (training only). Called from gRPC threads, and only
    read: the coordinator never sends Train while a peer loads."""

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face parameter name, CPU tensor) of this worker's stages; WorkError when the version differs."""


class KvReceiver(Protocol):
    """What a role offers to peers through the KvSink service (generation only). Called on the compute thread; what
    cannot be taken is an exception whose message says why."""

    def offer(self, offer: pb.KvOffer) -> "Room":
        """Keeps a slot for the sample, until `admit` or `drop`."""

    def admit(
        self, key: "SampleKey", hand_over: pb.KvHandOver, cache: "KvSlice | None", outbox: Outbox, size: int
    ) -> None:
        """Takes the sample; `size` bytes of cache were sent for it."""

    def drop(self, key: "SampleKey") -> None:
        """The arrival ended otherwise."""


class RoleFactory(Protocol):
    """Builds a role when its Become* command arrives; the first call of a process may take as long as loading does."""

    def __call__(self, job: RLHFJob, command: pb.Command, device: torch.device) -> Role: ...
