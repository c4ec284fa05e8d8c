"""A drafter with a configured acceptance, for benchmarks: it knows the responses and makes errors at the given rate."""

from collections.abc import Mapping, Sequence

import numpy as np

from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.generation.speculation.drafter import Draft, DraftRequest


class KnownResponses:
    """A drafter that knows the responses in advance and drafts each token correctly with a fixed probability."""

    name = "Known"

    def __init__(self, acceptance: float, responses: Mapping[int, Sequence[int]], vocabulary: int) -> None:
        self._drafts = {}
        for number, tokens in responses.items():
            random = np.random.default_rng(number)
            wrong = random.random(len(tokens)) >= acceptance
            other = (np.array(tokens) + random.integers(1, vocabulary, len(tokens))) % vocabulary
            self._drafts[number] = np.where(wrong, other, tokens).astype(np.int32)

    def begin(self, request: SampleRequest) -> None:
        """See Drafter."""

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """See Drafter."""

    def end(self, key: SampleKey) -> None:
        """See Drafter."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """See Drafter."""
        places = [len(request.tokens) - request.prompt_length for request in requests]
        return [
            Draft(self._drafts[request.key.sample][place : place + request.longest], 0)
            for request, place in zip(requests, places, strict=True)
        ]
