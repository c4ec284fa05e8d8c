"""A sample that was cut off, on its way into the next iteration (`spec.rollout.maxStaleness`).

It keeps its origin, by which its prompt and its random key follow, its tokens, the log-probabilities that the engine
which drew them gave, and the weight versions of both. A response that is finished comes as such, and is scored anew:
its critic is another one by then.
Rule: plain data. What becomes of it is decided once, by `scheduling.partial_rollouts`, and written down.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from rlhf_common.samples import Episode
from rlhf_coordinator.state.sample import Origin, PackedResponse, Sample


@dataclass(frozen=True, slots=True)
class CarriedSample:
    """What is known of it."""

    origin: Origin
    response: PackedResponse = field(default_factory=PackedResponse)
    finish_reason: str = ""
    """Empty while it is unfinished."""
    text: str = ""
    episode: Episode | None = None
    decoded_by: tuple[str, ...] = ()
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    restarted: bool = False
    """Its tokens were too old: it has none, and is begun anew."""
    failed: bool = False
    """No worker could decode it: it is not tried again, or it would end workers in every iteration."""

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """Return what is known of a sample."""
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


def origin_in(carried: Sequence[CarriedSample], iteration: int, index: int) -> Origin:
    """Return the origin of a sample of an iteration that began with what was carried."""
    return carried[index].origin if index < len(carried) else Origin(iteration, index)
