"""The tokens of each prompt group that each worker has, the numbers of sent and dropped ones, and earlier responses.

Rule: plain data, outside the ledger.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rlhf_coordinator.state.earlier_responses import EarlierResponses

EARLIER_WEIGHT: Final = 0.5
"""Weight of responses of the newest earlier iteration. The weight falls by this factor with each older iteration."""


class TokenSource(NamedTuple):
    """The origin of tokens: a sample of the iteration in progress, or of an earlier one."""

    iteration: int
    sample: int


@dataclass
class SiblingState:
    """The shared tokens of the iteration in progress, counted once for each worker, and the earlier responses."""

    has: dict[int, dict[str, dict[TokenSource, int]]] = field(default_factory=dict)
    """Prompt group -> worker that got tokens of it -> source -> number of tokens that it has, sent or decoded there."""
    next_share: float = 0.0
    """Moment before which no full round of sharing begins, in seconds of the monotonic clock."""
    next_group: int = 0
    """Group with which the next full round begins."""
    sent: int = 0
    dropped: int = 0
    """Tokens that a worker had not received when it no longer needed the group."""
    earlier: EarlierResponses = field(default_factory=EarlierResponses)

    def begin_iteration(self) -> None:
        """Reset the state of an iteration, except `earlier`."""
        self.has, self.next_share, self.next_group, self.sent, self.dropped = {}, 0.0, 0, 0, 0

    def forget_worker(self, worker: str) -> None:
        """Record that a worker has no tokens of any group."""
        for group in list(self.has):
            self.forget(group, worker)

    def forget(self, group: int, worker: str) -> None:
        """Drop the record of a worker's tokens of a group."""
        workers = self.has.get(group, {})
        workers.pop(worker, None)
        if not workers:
            self.has.pop(group, None)


def weights(iterations: Iterable[int]) -> dict[int, float]:
    """Return iteration -> weight of the responses that were sampled in it."""
    return {number: EARLIER_WEIGHT ** (age + 1) for age, number in enumerate(sorted(set(iterations), reverse=True))}
