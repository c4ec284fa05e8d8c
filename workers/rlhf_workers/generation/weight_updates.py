"""Loads new weights into a generation worker: the policy's, and those of a draft model trained with it.

Rule: loading starts after both were fetched. If a fetch fails, the previous weights stay. If loading fails after the
policy's weights were replaced, the engine has no version.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from rlhf_common import control_pb2 as pb
from rlhf_workers.generation.engine import Engine
from rlhf_workers.generation.speculation.speculator import Speculates
from rlhf_workers.weights.adapters import WeightFetcher
from rlhf_workers.weights.fetching import FetchedWeights
from rlhf_workers.worker_role import NO_VERSION


@runtime_checkable
class TakesDraftWeights(Protocol):
    """A speculator, or the draft model of an engine that drafts by itself (`vllm_draft_model`)."""

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> int: ...


@dataclass(frozen=True)
class WeightUpdate:
    """Fetched weights of one version."""

    version: int
    policy: FetchedWeights
    draft: FetchedWeights | None
    """Weights of the draft model; None if none comes with the policy, or the engine has no drafter that takes it."""

    @property
    def ways(self) -> str:
        """Transports of the policy's weights, as text for people."""
        return self.policy.ways

    @property
    def bytes_by_way(self) -> dict[str, int]:
        """Bytes of all weights, by transport."""
        parts = [self.policy.bytes_by_way, *([] if self.draft is None else [self.draft.bytes_by_way])]
        return {way: sum(part.get(way, 0) for part in parts) for part in parts for way in part}


class WeightUpdates:
    """Weight updates of one engine."""

    def __init__(self, engine: Engine, certificates: Path | None, weight_fetcher: WeightFetcher) -> None:
        self._engine, self._certificates, self._weight_fetcher = engine, certificates, weight_fetcher
        self.draft_versions: dict[str, int] = {}
        """Version of the draft model that was loaded last, by its name; empty before, NO_VERSION after a load of it
        that failed."""

    @contextmanager
    def fetched(self, command: pb.LoadWeights) -> Iterator[WeightUpdate]:
        """Yield the weights that a command names and the engine takes. Raises as the fetcher does."""
        with ExitStack() as stack:

            def fetched(model: str) -> FetchedWeights:
                source = self._weight_fetcher(model, command.version, command.sources, self._certificates)
                return stack.enter_context(source)

            policy = fetched(command.model)
            draft = fetched(command.draft_model) if command.draft_model and self._drafts is not None else None
            yield WeightUpdate(command.version, policy, draft)

    def load(self, command: pb.LoadWeights, update: WeightUpdate, before: Callable[[], None]) -> int:
        """Replace the weights of policy and draft model; return bytes.

        `before` is called first. An error leaves the engine unchanged, or without a version.
        """
        before()
        size = self._engine.load_weights(update.policy.tensors, update.version)
        try:
            if update.draft is not None:
                size += self._load_draft(command.draft_model, update.draft, update.version)
            update.policy.confirm()
        except BaseException:
            self._engine.version = NO_VERSION
            raise
        return size

    def _load_draft(self, name: str, draft: FetchedWeights, version: int) -> int:
        assert self._drafts is not None, "workers that draft with it fetch it"
        self.draft_versions[name] = NO_VERSION
        size = self._drafts.load_weights(draft.tensors)
        draft.confirm()
        self.draft_versions[name] = version
        return size

    @property
    def _drafts(self) -> TakesDraftWeights | None:
        """The engine's own draft model, or its speculator if that takes weights; None if neither."""
        own = getattr(self._engine, "vllm_draft_model", None)
        speculator = self._engine.speculator if isinstance(self._engine, Speculates) else None
        takes = speculator if speculator is not None and speculator.takes_weights else None
        return own if isinstance(own, TakesDraftWeights) else takes
