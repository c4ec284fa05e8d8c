"""What a worker can do: the seam between the agent (streams, threads, reconnecting) and the work (engines, scorers).

Rule: the agent's one compute thread calls every method of every role, so a role needs no locks; a role never touches
gRPC streams, it speaks through the Outbox. A worker may hold several roles (generation and inference) at once; the
agent steps generation first, and the others when it had nothing to do. When a session breaks, the agent calls
`give_back`, drops what the Outbox still holds except the CommandDone of a running command, and registers anew; the
coordinator sends again what it wants. What only some roles can do is a Protocol of its own, found by isinstance. The
roles of models (actor, critic, ...) are another thing.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey
from rlhf_workers.models.kv_slices import KvReservation, KvSlice


class Outbox(Protocol):
    """Thread-safe way out to the coordinator; never blocks the compute thread."""

    def progress(self, message: pb.SampleProgress) -> None:
        """Reports the tokens decoded since the last progress of this sample."""

    def finished(self, message: pb.FinishedSample) -> None:
        """Reports a complete response."""

    def failed(self, message: pb.FailedSample) -> None:
        """Reports that one sample cannot be decoded here and is not held any more."""

    def scored(self, message: pb.ScoredSample) -> None:
        """Reports that one task is done (or failed, or abstained) on one sample."""

    def prefix(self, message: pb.ScoredPrefix) -> None:
        """Reports that an unfinished sample was scored as far as it goes, or is not held."""

    def done(self, message: pb.CommandDone) -> None:
        """Answers a command."""

    def span(self, name: str, start_ns: int, end_ns: int, iteration: int, **attributes: str) -> None:
        """Reports something that took time, for the timeline; times are nanoseconds since the Unix epoch."""

    def observe(self, observation: pb.Observation) -> None:
        """Reports what a stretch of work took, for the cost model."""

    def count(self, tokens: int) -> None:
        """Adds to the tokens of the heartbeat."""

    def moved(self, what: str, size: int, seconds: float) -> None:
        """Adds to the bytes that were moved and the time it took, by kind of move."""


class WorkerRole(Protocol):
    """One role of a worker: generation, inference or training."""

    name: str
    """A value of `names.Group`."""

    handles: frozenset[str]
    """Names of the Command oneof this role takes, such as `generate`, `withdraw`, `load_weights`."""

    def handle(self, command: pb.Command, outbox: Outbox) -> None:
        """Takes a command and answers it by `outbox.done` exactly once, now or in a later `step`.

        A raised WorkError (or any exception: reason Internal) is answered by the agent as the command's failure.
        """

    def step(self, outbox: Outbox) -> bool:
        """Does one bounded piece of work (a decode step, a batch scored; well under a second); False: there is none."""

    def give_back(self) -> list[pb.SampleProgress]:
        """Drops every unfinished sample and returns it with all its tokens: the session is a new one."""

    def versions(self) -> Mapping[str, int]:
        """Return the weight version held of each model, by the model's role."""

    def active(self) -> int:
        """Return the number of samples held, for the heartbeat."""

    def offload(self) -> None:
        """Leaves device memory, holding no sample; its next work brings back what it needs. On a CPU nothing moves."""

    def close(self) -> None:
        """Frees devices and sockets; called once, at a clean exit."""


@runtime_checkable
class ReportsBetweenSteps(Protocol):
    """A role in which other threads finish work."""

    def report(self, outbox: Outbox) -> bool:
        """Says what other threads finished, in a round in which another role worked; whether there was anything."""


@runtime_checkable
class KeepsWeights(Protocol):
    """A role that may serve another weight version beside its own."""

    @property
    def kept_version(self) -> int:
        """Return that version; 0: none."""


@runtime_checkable
class LoadsWhileOffloaded(Protocol):
    """A role that may take new weights where it sleeps, in host memory."""

    @property
    def loads_while_offloaded(self) -> bool:
        """Return whether it sleeps now, and takes weights so."""


@runtime_checkable
class DraftsBySiblings(Protocol):
    """A role that drafts tokens by what other workers decode of the same prompts."""

    @property
    def learns_siblings(self) -> bool:
        """Return whether `learn` is of any use: who decodes here drafts, and by siblings."""

    def learn(self, message: pb.SiblingTokens) -> None:
        """Takes a hint; what is wrong with one is counted, and no failure."""


@runtime_checkable
class WeightProvider(Protocol):
    """A role that serves weights to peers through the WeightSource service.

    Called from gRPC threads, and only read: the coordinator never sends Train while a peer loads.
    """

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face parameter name, tensor) of this worker's stages, in the type that is published and where
        they are held, all on one device; WorkError for another version."""


class KvReceiver(Protocol):
    """Takes samples that come with their KV caches through the KvSink service.

    Called on the compute thread; what cannot be taken is an exception whose message says why.
    """

    def offer(self, offer: pb.KvOffer) -> KvReservation:
        """Keeps a slot for the sample, until `admit` or `drop`."""

    def admit(self, key: SampleKey, hand_over: pb.KvHandOver, cache: KvSlice | None, outbox: Outbox, size: int) -> None:
        """Takes the sample; `size` bytes of cache were sent for it."""

    def drop(self, key: SampleKey) -> None:
        """Gives the slot back: the arrival ended otherwise."""


@runtime_checkable
class ReceivesSamples(Protocol):
    """A role to which peers may move samples."""

    @property
    def receiver(self) -> KvReceiver:
        """Return what takes them."""
