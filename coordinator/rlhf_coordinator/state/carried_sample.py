"""A sample that was cut off, on its way into a later iteration (`spec.rollout.maxStaleness` and `longRounds`).

It has its origin, which determines its prompt and its random key, its tokens with their log-probabilities from the
engine that drew them, and their weight versions. A finished response stays finished, but is scored again, because
trained models have changed. Long rounds drop the tokens and decode them again.
Rule: plain data. `scheduling.first_samples` decides once what becomes of it, and the decision is recorded.
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
    """Whether its tokens were too old or too many: it has none, and starts again."""
    failed: bool = False
    """Whether no worker could decode it: it is not tried again, because it could end workers in every iteration."""

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
        """Return the sample without tokens: it starts again under its own random key."""
        return type(self)(self.origin, failed=self.failed)


def origin_in(carried: Sequence[CarriedSample], iteration: int, index: int) -> Origin:
    """Return the origin of a sample, in an iteration that began with carried samples."""
    return carried[index].origin if index < len(carried) else Origin(iteration, index)
