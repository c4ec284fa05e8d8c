"""Weights of one model at one version: in memory that peers lend, as streams of theirs, or from a Hugging Face folder.

Rule: all or nothing. `fetch_weights` gives every tensor, each with the checksum that its source announced, or raises
WorkError with the source's name; a caller never sees half a model. Memory that cannot be borrowed is streamed instead,
and nothing has been touched by then. Waits end: a silent peer is cut off and tried again a few times. Must never read
pickled files.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from rlhf_common import control_pb2 as pb
from rlhf_workers.failures import WorkError
from rlhf_workers.progress import WorkStage, stage
from rlhf_workers.shared_memory.regions import MemorySharing
from rlhf_workers.weights.folder import read_folder
from rlhf_workers.weights.loan import BorrowedWeights, LoanRefusedError, borrow
from rlhf_workers.weights.stream import WeightsRefusedError, WeightStream

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FetchPolicy:
    """How long to wait for a peer, and how often to try."""

    attempts: int = 4
    backoff_seconds: float = 0.5
    """Before the second attempt; doubles each time."""
    describe_seconds: float = 120.0
    """The peer computes checksums of its whole stage meanwhile."""
    idle_seconds: float = 30.0
    """Without a chunk; a healthy peer sends hundreds a second."""


DEFAULT_FETCH_POLICY = FetchPolicy()

STREAM: Final = "stream"
FOLDER: Final = "folder"
"""Ways by which weights come, beside the kinds of memory that is borrowed."""


@dataclass
class FetchedWeights:
    """All tensors of a model at a version, as long as its context is open."""

    tensors: dict[str, torch.Tensor]
    """Hugging Face parameter name -> tensor: of this process, or of a peer's memory; not to be written."""
    bytes_by_way: dict[str, int]
    """Bytes that came as a stream, from a folder, or in each kind of borrowed memory."""
    borrowed: Sequence[BorrowedWeights] = ()

    def confirm(self) -> None:
        """After the last copy: WorkError WeightsTorn when a peer went while its device memory was read."""
        for one in self.borrowed:
            one.confirm()

    @property
    def ways(self) -> str:
        """Return how they came, for people."""
        return ", ".join(sorted(self.bytes_by_way))


@dataclass(frozen=True)
class _Part:
    source: str
    way: str
    tensors: dict[str, torch.Tensor]
    borrowed: BorrowedWeights | None = None


@contextmanager
def fetch_weights(
    model: str,
    version: int,
    sources: Sequence[pb.WeightLocation],
    certificates: Path | None,
    sharings: Sequence[MemorySharing] = (),
    patience: FetchPolicy = DEFAULT_FETCH_POLICY,
) -> Iterator[FetchedWeights]:
    """The weights of `model` at `version`, from all sources at once: borrowed where `sharings` reach a peer, or
    streamed.

    Raises WorkError before anything is given: WeightsUnavailable (peer gone, silent, or at another version),
    WeightsCorrupt (checksum, order or size), WeightsConflict (two sources hold one parameter), ModelCorrupt (folder).
    """
    if not sources:
        raise WorkError("WeightsUnavailable", f"{model} version {version}: no source was given", retryable=True)
    streams = [WeightStream(model, version, location.address, certificates) for location in sources if location.address]
    folders = [location.folder for location in sources if not location.address]
    with ExitStack() as stack:
        pool = ThreadPoolExecutor(max_workers=max(len(streams), 1), thread_name_prefix="weights")
        futures = [pool.submit(_from_peer, stream, sharings, patience) for stream in streams]
        stack.callback(_give_back, futures)
        try:
            parts = [_Part(folder, FOLDER, read_folder(model, Path(folder))) for folder in folders]
            with stage(f"fetching {model} version {version}") as fetching:
                _watch(futures, streams, patience.idle_seconds, fetching)
        finally:
            for stream in streams:
                stream.close()
            pool.shutdown()
        parts += [future.result() for future in futures]
        yield _merge(model, version, parts)


def fetch(
    model: str,
    version: int,
    sources: Sequence[pb.WeightLocation],
    certificates: Path | None,
    patience: FetchPolicy = DEFAULT_FETCH_POLICY,
) -> dict[str, torch.Tensor]:
    """Parameter name -> CPU tensor of this process, as streams and folders give them. Raises as `fetch_weights`."""
    with fetch_weights(model, version, sources, certificates, (), patience) as weights:
        return weights.tensors


def _from_peer(stream: WeightStream, sharings: Sequence[MemorySharing], patience: FetchPolicy) -> _Part:
    for first in range(len(sharings)):  # memory of the device that cannot be opened may do on the host
        usable = sharings[first:]
        try:
            loan = borrow(
                stream.model, stream.version, stream.address, stream.certificates, usable, patience.describe_seconds
            )
        except LoanRefusedError as error:
            log.info("%s: version %d of %s is not borrowed: %s", stream.address, stream.version, stream.model, error)
        else:
            return _Part(stream.address, loan.kind, loan.tensors, loan)
    return _Part(stream.address, STREAM, _persist(stream, patience))


def _give_back(futures: "Sequence[Future[_Part]]") -> None:
    """Ends the loans, those too that came although another source failed."""
    for future in futures:
        if not future.exception() and (borrowed := future.result().borrowed) is not None:
            borrowed.close()


def _persist(stream: WeightStream, patience: FetchPolicy) -> dict[str, torch.Tensor]:
    """One source until it worked, was refused, or the attempts are used up."""
    for attempt in range(1, patience.attempts + 1):
        try:
            return stream.read(patience.describe_seconds)
        except WeightsRefusedError:
            raise
        except WorkError as error:
            if stream.closed or not error.failure.retryable or attempt == patience.attempts:
                raise
            log.warning("attempt %d of %d: %s", attempt, patience.attempts, error)
            time.sleep(patience.backoff_seconds * 2 ** (attempt - 1))
    raise AssertionError("unreachable")


def _watch(
    futures: "Sequence[Future[_Part]]", streams: Sequence[WeightStream], idle_seconds: float, fetching: WorkStage
) -> None:
    """Waits for all; cuts off streams that went silent; raises the first failure."""
    pending = set(futures)
    while pending:
        finished, pending = wait(pending, timeout=min(idle_seconds / 4, 1.0), return_when=FIRST_EXCEPTION)
        for future in finished:
            future.result()
        fetching.reached(sum(stream.received for stream in streams), sum(stream.size for stream in streams))
        for stream in streams:
            stream.cut_off_if_idle(idle_seconds)


def _merge(model: str, version: int, parts: Sequence[_Part]) -> FetchedWeights:
    merged: dict[str, torch.Tensor] = {}
    owner: dict[str, str] = {}
    sizes: Counter[str] = Counter()
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in merged:
                message = f"{model} version {version}: {name} comes from both {owner[name]} and {part.source}"
                raise WorkError("WeightsConflict", message)
            merged[name], owner[name] = tensor, part.source
            sizes[part.way] += tensor.numel() * tensor.element_size()
    if not merged:
        sources = ", ".join(part.source for part in parts)
        raise WorkError("WeightsUnavailable", f"{model} version {version}: {sources} hold no parameter at all")
    return FetchedWeights(merged, dict(sizes), [part.borrowed for part in parts if part.borrowed is not None])
