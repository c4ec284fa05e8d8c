"""Which samples an iteration takes up from earlier ones, and which of them wait on. Rule: pure."""

from collections.abc import Iterable
from typing import NamedTuple

from rlhf_api.algorithms import samples_begun, samples_of_batch
from rlhf_api.algorithms.iteration_prompts import PromptSchedules
from rlhf_api.job import RLHFJobSpec
from rlhf_coordinator.scheduling.length_window import WindowFacts, window_samples
from rlhf_coordinator.scheduling.partial_rollouts import resume_partial
from rlhf_coordinator.state.carried_sample import CarriedSample


class FirstSamples(NamedTuple):
    """The samples that earlier iterations cut off, or that a window assigns, when an iteration begins."""

    carried: tuple[CarriedSample, ...]
    """Its first samples, in their order."""
    waiting: tuple[CarriedSample, ...]
    """Samples that wait for a later iteration, those that waited longest first."""


def first_samples(
    cut: Iterable[CarriedSample],
    iteration: int,
    spec: RLHFJobSpec,
    schedules: PromptSchedules,
    window: WindowFacts | None = None,
) -> FirstSamples:
    """Return the samples that an iteration takes up, and those that wait on.

    `cut`: samples that earlier iterations cut off or left to later ones, in the order in which they wait. `window`:
    facts for a sorted window; None without windows.
    """
    if window is not None:
        ordered, size = (
            window_samples(tuple(cut), iteration, spec, schedules, window),
            samples_begun(spec, schedules, iteration),
        )
        return FirstSamples(ordered[:size], ordered[size:])
    if spec.rollout.long_rounds == "Disabled":
        return FirstSamples(resume_partial(cut, iteration, spec.rollout), ())
    deferred = tuple(sample.without_response() for sample in cut)
    taken = samples_of_batch(spec) if schedules.at(iteration).is_long(iteration) else 0
    return FirstSamples(deferred[:taken], deferred[taken:])
