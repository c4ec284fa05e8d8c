"""Sorted windows (`spec.prompts.lengthWindow`): batches of prompts whose responses are expected to have like lengths.

    prompts of k iterations -> sort by expected length -> cut into k batches -> shuffle the batches

A window begins with an iteration whose number is a multiple of k, and ends with the job at the latest. All its samples
have the origins that they have without a window, so prompts, random keys and responses stay; only the iteration that
trains on them is another. Inside a batch prompts keep their order. A prompt of unknown length counts as the median.
Without any known length, as in the first epoch, nothing is sorted.
The order becomes a fact with the first record of the window, which has the samples of all its batches. Each later
record, and each checkpoint, has those of the batches left. So a coordinator that dies continues the same order.
Rule: pure.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlhf_api.algorithms import samples_begun, samples_per_prompt
from rlhf_api.algorithms.iteration_prompts import PromptSchedules
from rlhf_api.job import RLHFJobSpec
from rlhf_coordinator.state.carried_sample import CarriedSample
from rlhf_coordinator.state.sample import Origin


class WindowFacts(NamedTuple):
    """Facts about the prompts of a job, from which a window's order follows."""

    expected: Callable[[Origin], int | None]
    """Expected response tokens of a sample's prompt; None if unknown."""
    key: Callable[[int], int]
    """Random key of a batch of the window, by its place in the sorted order."""


def window_samples(
    left: Sequence[CarriedSample], iteration: int, spec: RLHFJobSpec, schedules: PromptSchedules, facts: WindowFacts
) -> tuple[CarriedSample, ...]:
    """Return the samples of the iteration and of the later ones of its window, in order.

    Empty where the iteration takes its own prompts. `left`: samples that earlier iterations handed on. Prompts that
    oversampling dropped are the last of them, fewer than an iteration has, and are ignored.
    """
    size, window = samples_begun(spec, schedules, iteration), spec.prompts.length_window
    if batches := len(left) // size:
        return tuple(sample.without_response() for sample in left[: batches * size])
    if iteration % window:
        return ()
    iterations = range(iteration, min(iteration + window, spec.iterations))
    each = samples_per_prompt(spec)
    prompts = [Origin(number, first) for number in iterations for first in range(0, size, each)]
    keys = [facts.key(batch) for batch in range(len(iterations))]
    order = sorted_batches([facts.expected(origin) for origin in prompts], keys)
    groups = [prompts[place] for batch in order for place in batch]
    return tuple(CarriedSample(Origin(group.iteration, group.sample + k)) for group in groups for k in range(each))


def sorted_batches(expected: Sequence[int | None], keys: Sequence[int]) -> list[list[int]]:
    """Return the places of the prompts of each batch of a window; empty if no length is known.

    `expected`: expected tokens by place; `keys`: a number for each batch, by which the batches are shuffled.
    """
    lengths = [tokens for tokens in expected if tokens is not None]
    if not lengths:
        return []
    middle = statistics.median_low(lengths)
    places = sorted(range(len(expected)), key=lambda place: (_or(expected[place], middle), place))
    size = len(places) // len(keys)
    batches = [sorted(places[batch * size : (batch + 1) * size]) for batch in range(len(keys))]
    return [batches[batch] for batch in sorted(range(len(keys)), key=lambda batch: (keys[batch], batch))]


def _or(tokens: int | None, otherwise: int) -> int:
    return otherwise if tokens is None else tokens
