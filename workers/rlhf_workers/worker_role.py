"""Interface between the agent (streams, threads, sessions) and a worker's work (engines, scorers, trainers).

Rule: the compute thread executes the commands and steps of every role, so a role needs no locks for them.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Protocol, runtime_checkable

import torch

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey
from rlhf_workers.models.kv_slices import KvReservation, KvSlice

NO_VERSION: Final = -1
"""Weight version of a model whose last update was interrupted, until a complete version is loaded."""


class Outbox(Protocol):
    """Thread-safe way to report to the coordinator without waiting for the network."""

    def progress(self, message: pb.SampleProgress) -> None:
        """Report response tokens of an unfinished sample, from an offset on."""

    def finished(self, message: pb.FinishedSample) -> None:
        """Report a complete response."""

    def failed(self, message: pb.FailedSample) -> None:
        """Report that this worker cannot decode a sample and has dropped it."""

    def scored(self, message: pb.ScoredSample) -> None:
        """Report that one task is done (or failed, or abstained) for one sample."""

    def prefix(self, message: pb.ScoredPrefix) -> None:
        """Report that an unfinished sample was scored as far as it goes, or is not here."""

    def done(self, message: pb.CommandDone) -> None:
        """Answer a command."""

    def span(self, name: str, start_ns: int, end_ns: int, iteration: int, **attributes: str) -> None:
        """Report a span for the timeline; times are nanoseconds since the Unix epoch."""

    def observe(self, observation: pb.Observation) -> None:
        """Report the measured cost of some work, for the cost model."""

    def count(self, tokens: int) -> None:
        """Add to the tokens of the heartbeat."""

    def moved(self, kind: str, size: int, seconds: float) -> None:
        """Add moved bytes and their seconds, by kind of move."""


class WorkerRole(Protocol):
    """One role of a worker: generation, inference or training."""

    name: str
    """A value of `names.Group`."""

    handles: frozenset[str]
    """Names of the Command oneof that this role takes, such as `generate`, `withdraw`, `load_weights`."""

    def handle(self, command: pb.Command, outbox: Outbox) -> None:
        """Execute a command and answer it by `outbox.done` exactly once, now or in a later `step`. The compute thread
        answers with the failure of a raised exception.
        """

    def step(self, outbox: Outbox) -> bool:
        """Do one bounded step, such as decoding or scoring a batch; return False if there was no work."""

    def give_back(self) -> list[pb.SampleProgress]:
        """Drop every unfinished sample; return those that were to be decoded, with all their tokens so far."""

    def versions(self) -> Mapping[str, int]:
        """Return weight versions by model; NO_VERSION after an interrupted update. Models without updates may be
        absent."""

    def active(self) -> int:
        """Return the number of samples not yet decoded, or of scores not yet reported, for the heartbeat; 0 in
        training."""

    def offload(self) -> None:
        """Free device memory as far as it can, while no sample is active; later work loads what it needs."""

    def close(self) -> None:
        """Free what it holds; called once, when the compute thread ends or before a new role of this kind."""


@runtime_checkable
class ReportsBetweenSteps(Protocol):
    """A role whose other threads finish work."""

    def report(self, outbox: Outbox) -> bool:
        """Report work of other threads while another role steps; return whether there was any."""


@runtime_checkable
class KeepsWeights(Protocol):
    """A role that may serve a second weight version."""

    @property
    def kept_version(self) -> int:
        """The second weight version; 0 also if there is none."""


@runtime_checkable
class LoadsWhileOffloaded(Protocol):
    """A role that may load weights into host memory while it sleeps."""

    @property
    def loads_while_offloaded(self) -> bool:
        """Whether it sleeps now and can load weights."""


@runtime_checkable
class DraftsBySiblings(Protocol):
    """A role that drafts from the tokens of siblings on other workers."""

    @property
    def learns_siblings(self) -> bool:
        """Whether `learn` has an effect: drafting is on and uses siblings."""

    def learn(self, message: pb.SiblingTokens) -> None:
        """Take a hint; an invalid one raises nothing."""


@runtime_checkable
class DecodesAhead(Protocol):
    """A role that decodes samples of the next iteration as drafts."""

    @property
    def decodes_ahead(self) -> bool:
        """Whether the job drafts ahead and the engine can."""


@runtime_checkable
class WeightProvider(Protocol):
    """A role that serves weights to peers through the WeightSource service.

    Other threads call it, and it only reads.
    """

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face parameter name, tensor) for this worker's stages, in the published type and all on one
        device.

        Raises WorkError for another version.
        """


class KvReceiver(Protocol):
    """Takes samples that arrive with their KV caches through the KvSink service.

    Called on the compute thread. An exception says why a sample cannot be taken.
    """

    def offer(self, offer: pb.KvOffer) -> KvReservation:
        """Reserve a slot for the sample, until `admit` or `drop`."""

    def admit(self, key: SampleKey, hand_over: pb.KvHandOver, cache: KvSlice | None, outbox: Outbox, size: int) -> None:
        """Take the sample; `size` bytes of cache were received for it."""

    def drop(self, key: SampleKey) -> None:
        """Release the slot of an arrival that failed."""


@runtime_checkable
class ReceivesSamples(Protocol):
    """A role that can receive samples from peers."""

    @property
    def receiver(self) -> KvReceiver:
        """The receiver of these samples."""
