"""The siblings drafter guesses a sibling's continuation; data from others is bounded and checked."""

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_common.samples import SampleKey, SampleRequest
from rlhf_workers.generation.speculation.drafter import (
    MATCHES,
    Draft,
    Drafter,
    DraftRequest,
    LearnsSiblings,
    PromptGroup,
    SampleSource,
)
from rlhf_workers.generation.speculation.siblings import SiblingsDrafter
from rlhf_workers.generation.speculation.suffix_index import (
    FOUND_AT_ONCE,
    LONGEST_MATCH,
    START,
    SuffixIndex,
    _weight,
)

PROMPT = np.array([5, 6], np.int32)
GROUP = PromptGroup(3, 0)
SAMPLES = 4
VOCABULARY = 50
LONGEST = 64
Tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def tokens(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def key(sample: int, iteration: int = 3, attempt: int = 1) -> SampleKey:
    return SampleKey(iteration, sample, attempt)


def request(at: SampleKey, earlier: Sequence[int] = ()) -> SampleRequest:
    return SampleRequest(at, PROMPT, 1, LONGEST, tokens(earlier), np.zeros(len(earlier), np.float32))


def drafter(max_bytes: int = 2**26) -> SiblingsDrafter:
    return SiblingsDrafter(SAMPLES, VOCABULARY, LONGEST, max_bytes)


def draft(siblings: SiblingsDrafter, response: Sequence[int], *, sample: int = 3, longest: int = 4) -> Draft:
    text = np.concatenate([PROMPT, tokens(response)])
    return siblings.draft([DraftRequest(key(sample), text, len(PROMPT), longest)])[0]


def guess(siblings: SiblingsDrafter, response: Sequence[int], *, sample: int = 3, longest: int = 4) -> list[int]:
    found: list[int] = draft(siblings, response, sample=sample, longest=longest).tokens.tolist()
    return found


def source(sample: int, iteration: int = 3) -> SampleSource:
    return SampleSource(iteration, sample)


def test_it_drafts_and_learns() -> None:
    assert isinstance(drafter(), Drafter)
    assert isinstance(drafter(), LearnsSiblings)


def test_a_sample_is_drafted_from_its_first_token_on_by_what_its_siblings_said() -> None:
    siblings = drafter()
    for sample, said in enumerate([[1, 2, 3, 4], [1, 2, 9, 8], [1, 2, 3, 5]]):
        siblings.begin(request(key(sample), said[:1]))
        siblings.extend(key(sample), tokens(said[1:]))
        siblings.end(key(sample))
    assert guess(siblings, []) == [1, 2, 3, 5]  # the majority, and the latest among equals
    assert guess(siblings, [1, 2, 9]) == [8]
    assert guess(siblings, [7, 2, 3], longest=1) == [5]
    assert guess(siblings, [7]) == []
    assert guess(siblings, [], sample=SAMPLES) == []  # of another group


def test_the_longest_match_counts_before_the_number_of_places() -> None:
    siblings = drafter()
    siblings.learn(GROUP, source(0), 0, tokens([8, 1, 2, 3, 8, 1, 2, 3]))
    siblings.learn(GROUP, source(1), 0, tokens([9, 1, 2, 4]))
    assert guess(siblings, [9, 1, 2], longest=1) == [4]
    assert guess(siblings, [5, 1, 2], longest=1) == [3]


def test_more_agreement_and_longer_matches_are_other_classes() -> None:
    siblings = drafter()
    classes = []
    for sample in range(3):
        siblings.learn(GROUP, source(sample), 0, tokens([*range(10, 30)]))
        classes.append(draft(siblings, [10, 11, 12]).match)
    classes.append(draft(siblings, [40, 10, 11, 12]).match)
    assert len(set(classes)) > 2
    assert all(0 <= value < MATCHES for value in classes)


def test_weight_of_earlier_epochs_and_age_count() -> None:
    siblings = drafter()
    for sample in range(2):
        siblings.learn(GROUP, source(sample, iteration=1), 0, tokens([1, 7]), 0.3)
    siblings.learn(GROUP, source(0), 0, tokens([1, 8]))
    assert guess(siblings, [1]) == [8]
    siblings.age()
    siblings.begin(request(key(2)))
    siblings.extend(key(2), tokens([1, 9]))
    assert guess(siblings, [1]) == [9]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.3, 0.5])), max_size=6), st.floats(0.1, 1))
def test_each_ageing_reduces_each_stored_token_once(parts: list[tuple[int, float]], weight: float) -> None:
    index, expected = SuffixIndex(), list[float]()
    text = index.add(weight, START)
    for count, factor in parts:
        index.append(text, tokens(range(count)))
        expected = [earlier * factor for earlier in [*expected, *[weight] * count]]
        index.age(factor)
    index.append(text, tokens([1, 2]))
    expected += [weight, weight]
    assert [_weight(text, LONGEST_MATCH + place) for place in range(len(text))] == pytest.approx(expected)


def test_deltas_join_repeats_are_left_out_and_a_gap_begins_a_text() -> None:
    siblings = drafter()
    siblings.learn(GROUP, source(0), 0, tokens([1, 2]))
    siblings.learn(GROUP, source(0), 1, tokens([2, 3]))
    assert guess(siblings, [1]) == [2, 3]
    siblings.learn(GROUP, source(0), 10, tokens([4, 5]))
    siblings.learn(GROUP, source(0), 12, tokens([6]))
    assert guess(siblings, [3]) == []
    assert guess(siblings, [9, 4]) == [5, 6]
    assert guess(siblings, []) == [1, 2, 3]  # what is in the middle is no beginning


def test_a_sample_goes_on_where_others_told_of_it_and_says_otherwise_in_a_text_of_its_own() -> None:
    siblings = drafter()
    siblings.learn(GROUP, source(0), 0, tokens([1, 2]))
    siblings.begin(request(key(0), [1, 2, 3]))
    assert guess(siblings, [1]) == [2, 3]
    siblings.learn(GROUP, source(0), 3, tokens([9]))  # its own words, come back from the coordinator
    siblings.extend(key(0), tokens([4]))
    assert guess(siblings, [1]) == [2, 3, 4]
    siblings.begin(request(key(0, attempt=2), [1, 7]))
    siblings.extend(key(0), tokens([8]))  # of the lease before
    siblings.end(key(0))
    siblings.extend(key(0, attempt=2), tokens([6]))
    assert guess(siblings, [1, 7]) == [6]


def test_a_group_goes_when_it_is_forgotten_or_a_later_iteration_began() -> None:
    siblings = drafter()
    siblings.begin(request(key(0), [1, 2]))
    siblings.forget(GROUP)
    siblings.forget(GROUP)
    siblings.extend(key(0), tokens([3]))
    siblings.end(key(0))
    assert (siblings.held_groups, siblings.held_bytes, guess(siblings, [1])) == (0, 0, [])
    siblings.begin(request(key(0), [1, 2]))
    siblings.begin(request(key(0, iteration=4)))
    assert siblings.held_groups == 2  # one of its samples is decoded on
    siblings.end(key(0))
    siblings.begin(request(key(1, iteration=4)))
    assert siblings.held_groups == 1


@pytest.mark.parametrize(
    ("offset", "said", "weight"),
    [
        (-1, [1], 1.0),
        (0, [VOCABULARY], 1.0),
        (0, [-1], 1.0),
        (LONGEST, [1], 1.0),
        (2**40, [1], 1.0),
        (0, [1] * (LONGEST + 1), 1.0),
        (0, [1], 0.0),
        (0, [1], 1.5),
        (0, [1], float("nan")),
    ],
)
def test_what_is_out_of_bounds_is_left_out_and_counted(offset: int, said: list[int], weight: float) -> None:
    siblings = drafter()
    siblings.learn(GROUP, source(0), offset, tokens(said), weight)
    assert (siblings.refused_tokens, siblings.held_groups) == (len(said), 0)


def test_memory_is_bounded_whoever_speaks_and_those_that_decode_here_are_kept() -> None:
    siblings = drafter(max_bytes=200_000)
    siblings.begin(request(key(0), [1, 2]))
    random = np.random.default_rng(0)
    tracemalloc.start()
    try:
        for number in range(400):
            said = random.integers(0, VOCABULARY, LONGEST).astype(np.int32)
            siblings.learn(PromptGroup(3, 1 + number % 50), source(number), 0, said)
            assert siblings.held_bytes <= 200_000
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert allocated < 200_000
    assert guess(siblings, [1]) == [2]
    for number in range(400):
        siblings.learn(GROUP, source(1000 + number), 0, tokens([3] * LONGEST))
    assert siblings.held_bytes <= 200_000
    assert siblings.refused_tokens > 0
    assert guess(siblings, [1], sample=0) == [2]


@given(st.lists(st.lists(st.integers(0, 3), max_size=11), min_size=1, max_size=4), Tokens, st.integers(1, 8))
def test_a_guess_is_what_one_text_went_on_with_after_the_longest_match(
    texts: list[list[int]], response: list[int], longest: int
) -> None:
    siblings = drafter()
    for number, text in enumerate(texts):
        siblings.learn(GROUP, source(number), 0, tokens(text))
    found = guess(siblings, response, longest=longest)
    begun = [[*[-1] * LONGEST_MATCH, *text] for text in texts]
    end = [*[-1] * LONGEST_MATCH, *response]
    for match in range(LONGEST_MATCH, 0, -1):
        rests = [
            text[at:]
            for text in begun
            for at in range(LONGEST_MATCH, len(text))
            if text[at - match : at] == end[-match:]
        ]
        if rests:
            assert found, "something went on after such an end"
            assert any(rest[: len(found)] == found for rest in rests)
            return
    assert found == []


@given(st.lists(st.tuples(st.integers(0, 3), Tokens), max_size=30))
def test_what_is_forgotten_leaves_nothing(deltas: list[tuple[int, list[int]]]) -> None:
    siblings = drafter()
    for prompt, said in deltas:
        siblings.learn(PromptGroup(3, prompt), source(len(said)), 0, tokens(said))
    for prompt in range(4):
        siblings.forget(PromptGroup(3, prompt))
    assert (siblings.held_bytes, siblings.held_groups) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 3), Tokens), min_size=1, max_size=12), Tokens, st.data())
def test_when_it_is_asked_changes_no_guess(
    parts: list[tuple[int, list[int]]], response: list[int], data: st.DataObject
) -> None:
    """Pending tokens become searchable later, in the order in which each text received them."""
    once, often = drafter(), drafter()
    for sample in range(SAMPLES):
        for each in (once, often):
            each.begin(request(key(sample)))
    order = sorted(parts, key=lambda part: part[0])  # texts one after the other, as they are caught up with
    for sample, said in order:
        for each in (once, often):
            each.extend(key(sample), tokens(said))
        if data.draw(st.booleans()):
            draft(often, response)
    assert guess(once, response) == guess(often, response)
    assert draft(once, response).match == draft(often, response).match


def test_one_question_makes_a_bounded_number_of_tokens_findable_and_the_next_the_rest() -> None:
    siblings = SiblingsDrafter(SAMPLES, VOCABULARY, 3 * FOUND_AT_ONCE, 2**30)
    siblings.begin(SampleRequest(key(0), PROMPT, 1, 3 * FOUND_AT_ONCE, tokens([]), np.zeros(0, np.float32)))
    siblings.extend(key(0), tokens([1] * FOUND_AT_ONCE + [2, 3, 4]))
    assert guess(siblings, [2, 3], longest=1) == []
    assert guess(siblings, [2, 3], longest=1) == [4]
