"""Scripted drafts: right and wrong ones, of any length, for engines that verify the proposals of a speculator.

Rule: all randomness comes from one generator. Proposals and their outcomes are counted, so that a test can check that
they happened.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tests.support.model_folders.models import SPECIAL, VOCABULARY

from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.generation.speculation.drafter import DraftRequest
from rlhf_workers.generation.speculation.speculator import Verified


@dataclass
class ScriptedSpeculator:
    """Proposes the future tokens of samples, wrong from some position on."""

    random: np.random.Generator
    longest: int
    """Largest number of tokens of a draft; with `fixed` always this number."""
    right: float = 0.7
    """Probability that each drafted token is right."""
    fixed: bool = False
    answers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Future tokens of samples, by their number."""
    decoding: dict[SampleKey, list[int]] = field(default_factory=dict)
    """Reported tokens of present samples."""
    outcomes: list[Verified] = field(default_factory=list)
    passes: int = 0

    def begin(self, request: SampleRequest) -> None:
        """Implements Speculator."""
        assert request.key not in self.decoding
        self.decoding[request.key] = [*request.prompt.tolist(), *request.tokens.tolist()]

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """Implements Speculator."""
        self.decoding[key] += tokens.tolist()

    def end(self, key: SampleKey) -> None:
        """Implements Speculator."""
        del self.decoding[key]

    def wants(self, rows: int, keys: int) -> bool:
        """Implements Speculator."""
        return self.random.random() < 0.9

    def propose(self, requests: Sequence[DraftRequest], keys: int) -> list[TokenArray]:
        """Implements Speculator."""
        assert keys >= sum(len(request.tokens) for request in requests)
        return [self._draft(request) for request in requests]

    def verified(
        self, outcomes: Sequence[Verified], pass_rows: int, keys: int, draft_seconds: float, pass_seconds: float
    ) -> None:
        """Implements Speculator."""
        assert pass_rows >= len(outcomes) + sum(outcome.drafted for outcome in outcomes)
        assert min(draft_seconds, pass_seconds) > 0
        self.outcomes += outcomes
        self.passes += 1

    def _draft(self, request: DraftRequest) -> TokenArray:
        assert request.tokens.tolist() == self.decoding[request.key], "a drafter is told of every token"
        length = min(request.longest, self.longest if self.fixed else int(self.random.integers(self.longest + 1)))
        place = len(request.tokens) - request.prompt_length
        will_be = list(self.answers[request.key.sample][place : place + length])
        will_be += self.random.integers(len(SPECIAL), VOCABULARY, length - len(will_be)).tolist()
        wrong = self.random.random(length) >= self.right
        other = self.random.integers(len(SPECIAL), VOCABULARY, length)
        return np.where(wrong, other, np.array(will_be, np.int64)).astype(np.int32)

    @property
    def drafted(self) -> int:
        """Return the number of verified draft tokens."""
        return sum(outcome.drafted for outcome in self.outcomes)

    @property
    def accepted(self) -> int:
        """Return the number of accepted draft tokens."""
        return sum(outcome.accepted for outcome in self.outcomes)
