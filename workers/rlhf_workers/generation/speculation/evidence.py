"""Collects the outcomes of drafts since the last report, and the drafted tokens of each sample.

Rule: `take` returns the counts as a message and starts again.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey
from rlhf_planner.speculation.controller import MeasuredStep, Outcomes, Plan
from rlhf_planner.speculation.learned_drafts import MeanPass, pass_class
from rlhf_planner.speculation.learned_messages import add_pass

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_SAMPLES: Final = 8192
"""Maximum samples whose drafted tokens are stored; the least recently updated one is dropped."""


COUNTED_AT_ONCE: Final = 64
"""Maximum steps whose outcomes are counted together."""


class DraftedTokens(NamedTuple):
    """Drafted tokens of one sample, or of many."""

    drafted: int
    """Drafted tokens that were verified, without those after the end of a response."""
    accepted: int


NO_DRAFTS: Final = DraftedTokens(0, 0)


class Evidence:
    """Draft outcomes of one engine."""

    def __init__(self, drafters: Sequence[str], matches: int, longest: int) -> None:
        self._drafters = tuple(drafters)
        self._shape = (3, len(drafters), matches, longest)
        self._samples: dict[SampleKey, DraftedTokens] = {}
        self._begin()

    def _begin(self) -> None:
        self._counts: Ints = np.zeros(self._shape, np.int64)
        """Counts of drafted, judged and accepted tokens."""
        self._passes: dict[tuple[int, int], Floats] = {}
        """Passes and the sums of the other fields of `MeanPass`, by class."""
        self._message = pb.SpeculationObservation()
        self._outcomes: list[Outcomes] = []
        """Outcomes that are not counted yet."""
        self._rested = [0, 0, 0.0]
        """Steps without drafts and learning, their samples and seconds."""

    def stepped(self, plan: Plan, step: MeasuredStep, outcomes: Outcomes, regret: float) -> None:
        """Add a step."""
        message, seconds = self._message, max(step.pass_seconds, 1e-9)
        message.steps += 1
        message.drafted_steps += step.slots > 0
        message.probes += plan.probes
        message.samples += step.rows
        message.tokens += step.tokens
        message.draft_seconds += step.draft_seconds
        message.verify_seconds += step.pass_seconds if step.slots else 0.0
        message.regret_seconds += regret
        message.seconds += step.draft_seconds + step.pass_seconds
        mean_pass = MeanPass(1.0, float(max(1, step.rows)), float(step.slots), float(step.keys), seconds)
        self._passes.setdefault(pass_class(mean_pass), np.zeros(len(mean_pass)))[:] += mean_pass
        if len(outcomes.drafted):
            self._outcomes.append(outcomes)
            if len(self._outcomes) >= COUNTED_AT_ONCE:
                self._count()

    def rested(self, rows: int, seconds: float) -> None:
        """Add a step without drafts and without learning."""
        rested = self._rested
        rested[0] += 1
        rested[1] += rows
        rested[2] += seconds

    def _count(self) -> None:
        """Add outcomes to the counts."""
        if not self._outcomes:
            return
        columns = (np.concatenate(column) for column in zip(*self._outcomes, strict=True))
        drafters, matches, drafted, accepted = columns
        self._outcomes = []
        place, judged = np.arange(self._shape[3]), np.minimum(accepted + 1, drafted)
        for counts, tokens in zip(self._counts, (drafted, judged, accepted), strict=True):
            np.add.at(counts, (drafters, matches), place < tokens[:, None])

    def take(self) -> pb.SpeculationObservation | None:
        """Return the counts since the last call; None if there are none."""
        message, (steps, samples, seconds) = self._message, self._rested
        message.steps += int(steps)
        message.samples += int(samples)
        message.tokens += int(samples)
        message.seconds += seconds
        if not message.steps:
            return None
        self._count()
        for drafter, match, position in zip(*np.nonzero(self._counts[0]), strict=True):
            drafted, judged, accepted = map(int, self._counts[:, drafter, match, position])
            message.learned.counts.add(
                drafter=self._drafters[drafter],
                match=int(match),
                position=int(position),
                drafted=drafted,
                judged=judged,
                accepted=accepted,
            )
        for sums in self._passes.values():
            add_pass(message.learned, MeanPass(float(sums[0]), *(sums[1:] / sums[0]).tolist()))
        self._begin()
        return message

    # ------------------------------------------------------------ samples

    def verified(self, key: SampleKey, drafted: int, accepted: int) -> None:
        """Add the drafted tokens of a sample."""
        before = self._samples.pop(key, NO_DRAFTS)
        if len(self._samples) >= MAX_SAMPLES:
            self._samples.pop(next(iter(self._samples)))
        self._samples[key] = DraftedTokens(before.drafted + drafted, before.accepted + accepted)

    def of_finished(self, key: SampleKey) -> DraftedTokens:
        """Remove and return the drafted tokens of a finished sample; zeros if none are stored."""
        return self._samples.pop(key, NO_DRAFTS)
