"""Drafts as a test says: right ones and wrong ones, of any length, for engines that verify what a speculator proposes.

Rule: all chance comes from one generator. What is proposed and what became of it is counted, so that a test can tell
that it happened at all.
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
    """Proposes what samples will have, wrong from some place on."""

    random: np.random.Generator
    longest: int
    """Tokens of a draft at most; with `fixed` always so many."""
    right: float = 0.7
    """Chance of each drafted token to be what the sample will have."""
    fixed: bool = False
    answers: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """What samples will have, by their number."""
    decoding: dict[SampleKey, list[int]] = field(default_factory=dict)
    """What it was told of samples that are here."""
    outcomes: list[Verified] = field(default_factory=list)
    passes: int = 0

    def begin(self, request: SampleRequest) -> None:
        """See Speculator."""
        assert request.key not in self.decoding
        self.decoding[request.key] = [*request.prompt.tolist(), *request.tokens.tolist()]

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """See Speculator."""
        self.decoding[key] += tokens.tolist()

    def end(self, key: SampleKey) -> None:
        """See Speculator."""
        del self.decoding[key]

    def wants(self, rows: int, keys: int) -> bool:
        """See Speculator."""
        return self.random.random() < 0.9

    def propose(self, requests: Sequence[DraftRequest], keys: int) -> list[TokenArray]:
        """See Speculator."""
        assert keys >= sum(len(request.tokens) for request in requests)
        return [self._draft(request) for request in requests]

    def verified(
        self, outcomes: Sequence[Verified], pass_rows: int, keys: int, draft_seconds: float, pass_seconds: float
    ) -> None:
        """See Speculator."""
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
        """Return how many tokens were drafted and judged."""
        return sum(outcome.drafted for outcome in self.outcomes)

    @property
    def accepted(self) -> int:
        """Return how many of them were accepted."""
        return sum(outcome.accepted for outcome in self.outcomes)
