"""Checks the coordinator's hints and passes them to the drafters: tokens of siblings and of earlier epochs.

Rule: hints are not trusted. A hint of an earlier iteration is ignored; an invalid part of one is ignored and counted.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlhf_api.algorithms import most_samples, samples_per_prompt
from rlhf_api.job import RLHFJobSpec
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import unpack
from rlhf_common.samples import FIRST_AHEAD_SAMPLE, TokenArray, is_ahead
from rlhf_workers.generation.speculation.drafter import PromptGroup, SampleSource


@dataclass(frozen=True)
class SiblingLimits:
    """Limits of a valid hint."""

    groups: int
    """Maximum prompt groups of an iteration."""
    batch: int
    """Maximum samples of an iteration, with replacements or with oversampling."""

    @classmethod
    def from_spec(cls, spec: RLHFJobSpec) -> "SiblingLimits":
        """Return the limits of a job."""
        batch = max(spec.rollout.batch_size * (1 + spec.algorithm.fields.refill.rounds), most_samples(spec))
        return cls(-(-batch // samples_per_prompt(spec)), batch)


class LearnsFromOthers(Protocol):
    """A speculator or one drafter that takes learned tokens."""

    def learn(
        self, group: PromptGroup, source: SampleSource, offset: int, tokens: TokenArray, weight: float = 1.0
    ) -> None:
        """See `drafter.LearnsSiblings`."""

    def forget(self, group: PromptGroup) -> None:
        """See `drafter.LearnsSiblings`."""


class SiblingHints:
    """Takes hints for the drafters of one engine."""

    def __init__(self, learner: LearnsFromOthers, limits: SiblingLimits) -> None:
        self._learner, self._limits = learner, limits
        self._groups: set[PromptGroup] = set()
        self._iteration = -1
        self.learned = 0
        """Number of tokens given to drafters."""
        self.refused = 0
        """Number of invalid deltas."""

    def take(self, message: pb.SiblingTokens) -> None:
        """Take a message; ignore one of an earlier iteration."""
        if message.iteration < self._iteration:
            return
        self.begin_iteration(message.iteration)
        for number in message.forgotten:
            self._forget(PromptGroup(message.iteration, number))
        for delta in message.deltas:
            tokens = self._tokens(message.iteration, delta)
            if tokens is None:
                self.refused += 1
                continue
            group = PromptGroup(message.iteration, delta.group)
            self._groups.add(group)
            self.learned += len(tokens)
            source = SampleSource(delta.iteration, delta.sample)
            self._learner.learn(group, source, delta.offset, tokens, delta.weight)

    def begin_iteration(self, iteration: int) -> None:
        """Drop all groups if a later iteration begins."""
        if iteration > self._iteration:
            self.clear()
            self._iteration = iteration

    def clear(self) -> None:
        """Drop all groups."""
        for group in tuple(self._groups):
            self._forget(group)

    def _forget(self, group: PromptGroup) -> None:
        self._groups.discard(group)
        self._learner.forget(group)

    def _tokens(self, iteration: int, delta: pb.SiblingDelta) -> TokenArray | None:
        """Return the tokens of a delta; None if it is invalid."""
        limits = self._limits
        valid = 0 <= delta.group < limits.groups and 0 <= delta.iteration <= iteration
        number = delta.sample - FIRST_AHEAD_SAMPLE if is_ahead(delta.sample) else delta.sample
        if not valid or not 0 <= number < limits.batch:
            return None
        try:
            tokens: npt.NDArray[Any] = unpack(delta.tokens)
        except ValueError:
            return None
        return tokens if tokens.dtype == np.int32 and tokens.ndim == 1 and len(tokens) else None
