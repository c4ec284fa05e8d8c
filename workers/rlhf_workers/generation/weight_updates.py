"""New weights for a generation worker: the policy's, and those of a draft model that is trained with it.

Rule: both or neither. Nothing is loaded before all tensors of both are there, checked; so where one of them does not
come (a peer gone, a version that it does not hold, a damaged tensor), the pair of before goes on and the coordinator
asks again. What breaks off while it is copied leaves the worker without a version: it decodes nothing until it was
given both anew. An engine without a drafter that has weights is given the policy's alone.
When the process dies here nothing is left half-way: the next one is given both.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from rlhf_common import control_pb2 as pb
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import NO_VERSION, Engine
from rlhf_workers.generation.speculation.speculator import Speculates
from rlhf_workers.weights.adapters import WeightFetcher
from rlhf_workers.weights.fetching import FetchedWeights


@runtime_checkable
class TakesDraftWeights(Protocol):
    """What drafts by a model: a speculator, or an engine that drafts by itself (its `vllm_draft_model`)."""

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> int: ...


@dataclass(frozen=True)
class WeightUpdate:
    """Weights of one version that are there and not yet loaded."""

    version: int
    policy: FetchedWeights
    draft: FetchedWeights | None
    """Of the draft model, where one comes with the policy and somebody drafts by it."""

    @property
    def ways(self) -> str:
        """Return how the policy's came, for people."""
        return self.policy.ways

    @property
    def bytes_by_way(self) -> dict[str, int]:
        """Return the bytes of all of them, by the way they came."""
        parts = [self.policy.bytes_by_way, *([] if self.draft is None else [self.draft.bytes_by_way])]
        return {way: sum(part.get(way, 0) for part in parts) for part in parts for way in part}


class WeightUpdates:
    """Of one engine."""

    def __init__(self, engine: Engine, certificates: Path | None, weight_fetcher: WeightFetcher) -> None:
        self._engine, self._certificates, self._weight_fetcher = engine, certificates, weight_fetcher
        self.draft_versions: dict[str, int] = {}
        """Version of the draft model, by its name, once one came with the policy."""

    @contextmanager
    def fetched(self, command: pb.LoadWeights) -> Iterator[WeightUpdate]:
        """Give the weights that a command names, as long as the context is open. Raises as `fetch_weights`."""
        with ExitStack() as stack:

            def fetched(model: str) -> FetchedWeights:
                source = self._weight_fetcher(model, command.version, command.sources, self._certificates)
                return stack.enter_context(source)

            policy = fetched(command.model)
            draft = fetched(command.draft_model) if command.draft_model and self._drafts is not None else None
            yield WeightUpdate(command.version, policy, draft)

    def load(self, command: pb.LoadWeights, update: WeightUpdate, before: Callable[[], None]) -> int:
        """Replace the weights of policy and draft model; return bytes. `before` is called before the first copy.

        WorkError leaves the engine as it was, or without a version.
        """
        before()
        size = self._engine.load_weights(update.policy.tensors, update.version)
        try:
            if update.draft is not None:
                size += self._load_draft(command.draft_model, update.draft, update.version)
            update.policy.confirm()
        except WorkError:
            self._engine.version = NO_VERSION
            raise
        return size

    def _load_draft(self, name: str, draft: FetchedWeights, version: int) -> int:
        assert self._drafts is not None, "it is fetched for who drafts by it"
        size = self._drafts.load_weights(draft.tensors)
        draft.confirm()
        self.draft_versions[name] = version
        return size

    @property
    def _drafts(self) -> TakesDraftWeights | None:
        """Who drafts by weights: the engine itself, or its speculator."""
        own = getattr(self._engine, "vllm_draft_model", None)
        speculator = self._engine.speculator if isinstance(self._engine, Speculates) else None
        takes = speculator if speculator is not None and speculator.takes_weights else None
        return own if isinstance(own, TakesDraftWeights) else takes
