"""Connects a speculator with the job: passes on sibling hints and reports the outcomes of its steps.

Rule: without a speculator a JobDrafting does nothing. Hints and reports must never fail decoding.
"""

import logging
from typing import Final

from rlhf_api.job import RLHFJobSpec
from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey
from rlhf_planner.speculation.learned_messages import learned_of
from rlhf_workers.generation.engine import Engine, TakesDraftsAhead
from rlhf_workers.generation.speculation.evidence import NO_DRAFTS, DraftedTokens
from rlhf_workers.generation.speculation.sibling_hints import SiblingHints, SiblingLimits
from rlhf_workers.generation.speculation.speculator import Speculates, Speculator
from rlhf_workers.worker_role import Outbox

log = logging.getLogger(__name__)

REPORT_NS: Final = 2_000_000_000
"""Least nanoseconds between two reports during decoding, unless the clock is set back."""
NO_LIMITS: Final = SiblingLimits(0, 0)


class JobDrafting:
    """Drafting of one generation role."""

    def __init__(
        self,
        speculator: Speculator | None = None,
        limits: SiblingLimits = NO_LIMITS,
        *,
        decodes_ahead: bool = False,
    ) -> None:
        self._speculator = speculator
        self.decodes_ahead = decodes_ahead
        """Whether the job drafts ahead and the engine can."""
        self._hints: SiblingHints | None = None
        if speculator is not None and speculator.learns_siblings:
            self._hints = SiblingHints(speculator, limits)
        self._reported_ns = 0

    @classmethod
    def for_engine(cls, engine: Engine, spec: RLHFJobSpec, learned: pb.LearnedDrafts) -> "JobDrafting":
        """Return the drafting of an engine; its speculator starts with what other workers learned, if that is valid."""
        speculator = engine.speculator if isinstance(engine, Speculates) else None
        if speculator is not None:
            try:
                speculator.begin_with(learned_of(learned))
            except ValueError as error:
                log.warning("the draft statistics of other workers are ignored: %s", error)
        able = isinstance(engine, TakesDraftsAhead) and engine.takes_drafts_ahead
        ahead = able and spec.generation.speculation.ahead != "Disabled"
        return cls(speculator, SiblingLimits.from_spec(spec), decodes_ahead=ahead)

    @property
    def learns_siblings(self) -> bool:
        """Whether hints have an effect here."""
        return self._hints is not None

    def learn(self, message: pb.SiblingTokens) -> None:
        """Take a hint."""
        if self._hints is not None:
            self._hints.take(message)

    def begin_iteration(self, iteration: int) -> None:
        """Drop what hints taught about prompts of earlier iterations."""
        if self._hints is not None:
            self._hints.begin_iteration(iteration)

    def begin_session(self) -> None:
        """Drop what hints taught."""
        if self._hints is not None:
            self._hints.clear()

    def policy_changed(self) -> None:
        """Reduce the weight of what was learned: the policy has new weights."""
        if self._speculator is not None:
            self._speculator.policy_changed()

    def of_finished(self, key: SampleKey) -> DraftedTokens:
        """Remove and return the drafted tokens of a finished sample; zeros if there are none."""
        return NO_DRAFTS if self._speculator is None else self._speculator.evidence.of_finished(key)

    def report(self, iteration: int, now_ns: int, outbox: Outbox, *, idle: bool = False) -> None:
        """Report the outcomes since the last report, if one is due or decoding has ended."""
        if self._speculator is None or (not idle and 0 <= now_ns - self._reported_ns < REPORT_NS):
            return
        message = self._speculator.evidence.take()
        if message is not None:
            start_ns = now_ns - min(now_ns, int(message.seconds * 1e9))
            outbox.observe(pb.Observation(start_ns=start_ns, end_ns=now_ns, iteration=iteration, speculation=message))
        self._reported_ns = now_ns
