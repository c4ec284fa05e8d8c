"""Random drafts for samples whose responses are known: right, wrong, too long, invalid or none at all."""

from collections.abc import Mapping, Sequence

import numpy as np

from rlhf_common.samples import ResponsePart, SampleKey, SampleRequest, TokenArray
from rlhf_workers.generation.speculation.drafter import DraftRequest
from rlhf_workers.generation.speculation.speculator import Verified


class RandomDrafts:
    """Knows every response beforehand and proposes its next tokens, some of them changed."""

    def __init__(
        self, responses: Mapping[int, ResponsePart], vocabulary: int, *, right: float, longest: int, seed: int = 0
    ) -> None:
        """A token is right with probability `right`; a draft has up to `longest` tokens, and 0 means no drafts."""
        self.responses = responses
        self.decoded: dict[SampleKey, list[int]] = {}
        self.outcomes: list[Verified] = []
        self._vocabulary = vocabulary
        self._right = right
        self._longest = longest
        self._random = np.random.default_rng(seed)

    def begin(self, request: SampleRequest) -> None:
        """Check that every sample begins once."""
        assert request.key not in self.decoded
        self.decoded[request.key] = [*request.prompt, *request.tokens]

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """Check that tokens belong to present samples."""
        assert len(tokens)
        self.decoded[key] += tokens.tolist()

    def end(self, key: SampleKey) -> None:
        """Check that every sample ends once."""
        del self.decoded[key]

    def wants(self, rows: int, keys: int) -> bool:
        """Return False for some steps, which are then plain ones."""
        assert 1 <= rows <= keys
        return self._random.random() < 0.9

    def propose(self, requests: Sequence[DraftRequest], keys: int) -> list[TokenArray]:
        """Check that each request has the tokens that were reported here, and return its drafts."""
        assert keys >= sum(len(request.tokens) for request in requests)
        return [self._draft(request) for request in requests]

    def verified(
        self,
        outcomes: Sequence[Verified],
        pass_rows: int,
        keys: int,
        draft_seconds: float,
        pass_seconds: float,
    ) -> None:
        """Check that times and rows belong to a step that decoded."""
        assert pass_rows >= 1
        assert keys >= 1
        assert pass_seconds > 0
        assert draft_seconds >= 0
        assert all(0 <= outcome.accepted <= outcome.drafted for outcome in outcomes)
        self.outcomes += outcomes

    def _draft(self, request: DraftRequest) -> TokenArray:
        assert request.tokens.tolist() == self.decoded[request.key]
        assert request.longest >= 1
        if not self._longest or self._random.random() < 0.2:
            return np.empty(0, np.int32)
        position = len(request.tokens) - request.prompt_length
        most = self._random.integers(1, self._longest + 1)
        draft = self.responses[request.key.sample].tokens[position : position + most].copy()
        if self._random.random() < 0.2:  # longer than requested, and outside the vocabulary
            draft = np.concatenate([draft, self._random.integers(-2, self._vocabulary + 2, 20).astype(np.int32)])
        wrong = self._random.random(len(draft)) > self._right
        draft[wrong] = self._random.integers(0, self._vocabulary, int(wrong.sum()))
        return draft
