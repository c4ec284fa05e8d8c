"""A sample that was cut off, on its way into a later iteration (`spec.rollout.maxStaleness` and `longRounds`).

Its prompt and its random key follow from its origin. Rule: plain data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from rlhf_common.samples import Episode
from rlhf_coordinator.state.sample import Origin, PackedResponse, Sample


@dataclass(frozen=True, slots=True)
class CarriedSample:
    """One carried sample."""

    origin: Origin
    response: PackedResponse = field(default_factory=PackedResponse)
    finish_reason: str = ""
    """Reason why the response ended; empty while it is unfinished."""
    text: str = ""
    episode: Episode | None = None
    decoded_by: tuple[str, ...] = ()
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    restarted: bool = False
    """Whether it has no tokens because they were too old or too many for `spec.rollout`: it starts again."""
    failed: bool = False
    """Whether no worker could decode it: it is not tried again."""

    @classmethod
    def from_sample(cls, sample: Sample) -> Self:
        """Return the carried form of a sample."""
        return cls(
            origin=sample.origin,
            response=sample.response,
            finish_reason=sample.finish_reason,
            text=sample.text,
            episode=sample.episode,
            decoded_by=tuple(sample.decoded_by if len(sample.response) else ()),
            drafted_tokens=sample.drafted_tokens,
            accepted_tokens=sample.accepted_tokens,
            failed=sample.given_up,
        )

    def without_response(self) -> Self:
        """Return the sample without its response; whether it failed stays known."""
        return type(self)(self.origin, failed=self.failed)


def origin_in(carried: Sequence[CarriedSample], iteration: int, index: int) -> Origin:
    """Return the origin of a sample, in an iteration that began with carried samples."""
    return carried[index].origin if index < len(carried) else Origin(iteration, index)
