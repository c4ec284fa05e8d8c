"""Sorted windows: each prompt of a window is in one batch with the same key, and batches have like lengths."""

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job

from rlhf_api.algorithms import prompt_schedule, samples_begun
from rlhf_api.algorithms.iteration_prompts import PromptSchedules
from rlhf_api.job import RLHFJobSpec
from rlhf_coordinator.scheduling.first_samples import first_samples
from rlhf_coordinator.scheduling.length_window import WindowFacts, sorted_batches
from rlhf_coordinator.state.carried_sample import CarriedSample
from rlhf_coordinator.state.sample import Origin, PackedResponse
from rlhf_coordinator.storage.prompt_lengths import learned_lengths, lengths_message, lengths_of

LENGTHS = st.lists(st.one_of(st.none(), st.integers(1, 50)), min_size=4, max_size=4)


@given(st.lists(LENGTHS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_batches_share_the_prompts_by_length_in_a_keyed_order(
    batches: list[list[int | None]], rng: random.Random
) -> None:
    expected = [tokens for batch in batches for tokens in batch]
    keys = [rng.getrandbits(64) for _ in batches]
    order = sorted_batches(expected, keys)
    lengths = [tokens for tokens in expected if tokens is not None]
    if not lengths:
        assert order == []
        return
    assert sorted(place for batch in order for place in batch) == list(range(len(expected)))
    assert all(batch == sorted(batch) and len(batch) == 4 for batch in order), "inside a batch the order stays"
    by_length = [order[sorted(range(len(keys)), key=keys.__getitem__).index(batch)] for batch in range(len(keys))]
    ranges = [[tokens for place in batch if (tokens := expected[place]) is not None] for batch in by_length]
    bounds = [(min(part), max(part)) for part in ranges if part]
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(bounds))
    assert sorted_batches(expected, keys) == order


def test_a_prompt_of_unknown_length_counts_as_the_median() -> None:
    assert sorted_batches([None, 9, 1, 5, None, 5], [0, 1, 2]) == [[0, 2], [3, 4], [1, 5]]


def test_equal_lengths_keep_the_order_of_the_prompts_in_shuffled_batches() -> None:
    assert sorted_batches([7] * 6, [2, 0, 1]) == [[2, 3], [4, 5], [0, 1]]


def spec_of(folder: Path, window: int, iterations: int = 10, **rollout: int) -> RLHFJobSpec:
    prompts = {"path": "prompts.jsonl", "lengthWindow": window}
    return make_job(folder, iterations=iterations, batch=4, prompts=prompts, rollout={"batchSize": 4} | rollout).spec


def schedules(spec: RLHFJobSpec) -> PromptSchedules:
    return PromptSchedules((prompt_schedule(spec),))


def facts(learned: bool = True) -> WindowFacts:
    return WindowFacts(lambda origin: 1 + hash(origin) % 40 if learned else None, lambda batch: -batch)


@pytest.mark.parametrize("oversample", [0, 3])
def test_a_window_hands_its_batches_on_and_ends_with_the_job(tmp_path: Path, oversample: int) -> None:
    spec = spec_of(tmp_path, 4, oversample=oversample)
    size = samples_begun(spec, schedules(spec), 0)
    cut: tuple[CarriedSample, ...] = ()
    trained: Counter[Origin] = Counter()
    for iteration in range(10):
        begun = first_samples(cut, iteration, spec, schedules(spec), facts())
        assert len(begun.carried) == size
        left = (4 if iteration < 8 else 2) - iteration % 4 - 1
        assert len(begun.waiting) == left * size
        trained.update(sample.origin for sample in begun.carried)
        dropped = [CarriedSample(sample.origin, PackedResponse(bytes(4), bytes(4))) for sample in begun.carried]
        cut = (*begun.waiting, *dropped[:oversample])
    assert trained == dict.fromkeys((Origin(i, k) for i in range(10) for k in range(size)), 1)


def test_nothing_is_sorted_in_the_first_epoch_or_in_a_window_that_has_begun(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, 4)
    assert first_samples((), 4, spec, schedules(spec), facts(learned=False)) == ((), ())
    assert first_samples((), 5, spec, schedules(spec), facts()) == ((), ())


def test_a_prompt_is_expected_as_long_as_lately() -> None:
    after = learned_lengths({1: 10, 2: 20}, [(1, 30), (1, 50), (3, 7), (3, 8)], cut=[2, 4, 5])
    assert after == {1: 25, 2: 40, 3: 8, 4: 40, 5: 40}
    assert learned_lengths({1: 10}, [], cut=[1]) == {1: 10}
    assert lengths_of(lengths_message(after)) == after
