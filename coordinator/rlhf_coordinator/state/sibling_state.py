"""What each worker has of the tokens of each prompt group, what was sent and dropped; responses of earlier epochs.

Rule: plain data, outside the ledger: a hint that is lost costs time and changes no token. `scheduling.sibling_sharing`
reads it, `speculation.sharing` changes it. What a worker has is forgotten with its session, and with the group. When
the process dies nothing of it is kept, and workers are sent everything again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rlhf_coordinator.state.earlier_responses import EarlierResponses

EARLIER_WEIGHT: Final = 0.5
"""Of a response of the epoch before beside one of a sibling, and again of each epoch before that: the policy has moved
on since."""


class TokenSource(NamedTuple):
    """Whose tokens they are: a sample of the iteration in progress, or one of an iteration before."""

    iteration: int
    sample: int


@dataclass
class SiblingState:
    """What is shared in the iteration in progress. Tokens are counted once for each worker that they go to."""

    has: dict[int, dict[str, dict[TokenSource, int]]] = field(default_factory=dict)
    """Prompt group -> worker that was sent something of it -> source -> tokens that it has, sent or decoded there."""
    next_share: float = 0.0
    """Nothing is shared before this time, in seconds of the monotonic clock."""
    next_group: int = 0
    """With which group sharing goes on: each has its turn."""
    sent: int = 0
    dropped: int = 0
    """Tokens that a worker had not been sent when it needed nothing of the group any more."""
    earlier: EarlierResponses = field(default_factory=EarlierResponses)

    def begin_iteration(self) -> None:
        """Forget what belongs to an iteration; what `earlier` holds goes on."""
        self.has, self.next_share, self.next_group, self.sent, self.dropped = {}, 0.0, 0, 0, 0

    def forget_worker(self, worker: str) -> None:
        """Take in that a worker has nothing any more: it is gone, or its session is a new one."""
        for group in list(self.has):
            self.forget(group, worker)

    def forget(self, group: int, worker: str) -> None:
        """Take in that a worker is told nothing more of a group."""
        workers = self.has.get(group, {})
        workers.pop(worker, None)
        if not workers:
            self.has.pop(group, None)


def weights(iterations: Iterable[int]) -> dict[int, float]:
    """Return how much responses count that were sampled in these iterations of earlier epochs."""
    return {number: EARLIER_WEIGHT ** (age + 1) for age, number in enumerate(sorted(set(iterations), reverse=True))}
