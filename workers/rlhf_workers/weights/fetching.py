"""Fetches the weights of one model version: from borrowed memory of peers, streams, or a Hugging Face folder.

Rule: all or nothing. `fetch_weights` yields every tensor, or raises WorkError. Tensors of peers are checked against
their announced checksums.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
    """Time limits and retries for a peer."""

    attempts: int = 4
    backoff_seconds: float = 0.5
    """Pause in seconds before the second attempt; it doubles for each later one."""
    describe_seconds: float = 120.0
    """Time-out in seconds of Describe, and of the answer to a request for a loan."""
    idle_seconds: float = 30.0
    """Seconds without a chunk after which a stream is cut off."""


DEFAULT_FETCH_POLICY = FetchPolicy()

STREAM: Final = "stream"
FOLDER: Final = "folder"
"""Transports of weights beside borrowed memory."""


@dataclass
class FetchedWeights:
    """All tensors of a model version, valid while the context is open."""

    tensors: dict[str, torch.Tensor]
    """Hugging Face parameter name -> tensor, in this process or in a peer's memory; must not be written."""
    bytes_by_way: dict[str, int]
    """Bytes that arrived by each transport: stream, folder, or a kind of borrowed memory."""
    borrowed: Sequence[BorrowedWeights] = ()

    def confirm(self) -> None:
        """Check after the last copy; WorkError WeightsTorn if a peer may have ended during reads of device memory."""
        for region in self.borrowed:
            region.confirm()

    @property
    def ways(self) -> str:
        """Return the transports used, as text for people."""
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
    path_field: Callable[[str], str] = str,
) -> Iterator[FetchedWeights]:
    """Fetch the weights of `model` at `version` from all sources at once, borrowed through `sharings` or streamed.

    `path_field` returns the manifest path of a model's folder, for errors; by default, errors name the model itself.
    Raises WorkError before it yields: WeightsUnavailable (no source, no parameter, or a peer that is gone, silent or at
    another version), WeightsCorrupt (checksum, order or size), WeightsConflict (two sources have one parameter), or the
    errors of `read_folder`.
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
            parts = [_Part(folder, FOLDER, read_folder(path_field(model), Path(folder))) for folder in folders]
            with stage(f"fetching {model} version {version}") as fetching:
                _watch(futures, streams, patience.idle_seconds, fetching)
        finally:
            for stream in streams:
                stream.close()
            pool.shutdown()
        parts += [future.result() for future in futures]
        yield _merge(model, version, parts)


def _from_peer(stream: WeightStream, sharings: Sequence[MemorySharing], patience: FetchPolicy) -> _Part:
    for first in range(len(sharings)):  # if device memory cannot be opened, host memory may work
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
    """End the loans, including those that arrived although another source failed."""
    for future in futures:
        if not future.exception() and (borrowed := future.result().borrowed) is not None:
            borrowed.close()


def _persist(stream: WeightStream, patience: FetchPolicy) -> dict[str, torch.Tensor]:
    """Read one source; repeat after retryable errors until it is refused or closed, or the attempts are used up."""
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
    """Wait for all; cut off silent streams; raise the first failure."""
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
