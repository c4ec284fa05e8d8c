"""Weights of one model at one version, from peers that stream their stages or from a Hugging Face folder.

Rule: all or nothing. `fetch` returns every tensor, each with the checksum its source announced, or raises WorkError
with the source's name; a caller never sees half a model. Waits end: a silent peer is cut off and tried again a few
times. Never reads pickled files.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_api import control_pb2 as pb
from rlhf_workers.failures import WorkError
from rlhf_workers.weight_folder import read_folder
from rlhf_workers.weight_stream import WeightsRefusedError, WeightStream

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


def fetch(
    model: str,
    version: int,
    sources: Sequence[pb.WeightLocation],
    certificates: Path | None,
    patience: FetchPolicy = DEFAULT_FETCH_POLICY,
) -> dict[str, torch.Tensor]:
    """Hugging Face parameter name -> CPU tensor of `model` at `version`, from all sources at once.

    Raises WorkError: WeightsUnavailable (peer gone, silent, or at another version), WeightsCorrupt (checksum, order or
    size), WeightsConflict (two sources hold one parameter), ModelCorrupt (folder).
    """
    if not sources:
        raise WorkError("WeightsUnavailable", f"{model} version {version}: no source was given", retryable=True)
    streams = [WeightStream(model, version, location.address, certificates) for location in sources if location.address]
    folders = [location.folder for location in sources if not location.address]
    with ThreadPoolExecutor(max_workers=max(len(streams), 1), thread_name_prefix="weights") as pool:
        futures = [pool.submit(_persist, stream, patience) for stream in streams]
        try:
            parts = [(folder, read_folder(model, Path(folder))) for folder in folders]
            _watch(futures, streams, patience.idle_seconds)
        finally:
            for stream in streams:
                stream.close()
    parts += [(stream.address, future.result()) for stream, future in zip(streams, futures, strict=True)]
    return _merge(model, version, parts)


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
    futures: "Sequence[Future[dict[str, torch.Tensor]]]", streams: Sequence[WeightStream], idle_seconds: float
) -> None:
    """Waits for all; cuts off streams that went silent; raises the first failure."""
    pending = set(futures)
    while pending:
        finished, pending = wait(pending, timeout=min(idle_seconds / 4, 1.0), return_when=FIRST_EXCEPTION)
        for future in finished:
            future.result()
        for stream in streams:
            stream.cut_off_if_idle(idle_seconds)


def _merge(model: str, version: int, parts: Sequence[tuple[str, dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    owner: dict[str, str] = {}
    for source, tensors in parts:
        for name, tensor in tensors.items():
            if name in merged:
                message = f"{model} version {version}: {name} comes from both {owner[name]} and {source}"
                raise WorkError("WeightsConflict", message)
            merged[name], owner[name] = tensor, source
    if not merged:
        sources = ", ".join(source for source, _ in parts)
        raise WorkError("WeightsUnavailable", f"{model} version {version}: {sources} hold no parameter at all")
    return merged
