"""The drafter for drafts ahead follows a response while it equals them; tokens from others are bounded and checked."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.workers.engine_driving import MakeEngine, finish, requests, same_bits

from rlhf_common.samples import FIRST_AHEAD_SAMPLE, SampleKey, SampleRequest
from rlhf_workers.generation.speculation.ahead import AheadDrafter
from rlhf_workers.generation.speculation.drafter import Drafter, DraftRequest, LearnsSiblings, PromptGroup, SampleSource

PROMPT = np.array([5, 6], np.int32)
GROUP = PromptGroup(3, 0)
OTHER = PromptGroup(3, 1)
SAMPLES = 4
VOCABULARY = 50
LONGEST = 64


def tokens(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def source(sample: int, iteration: int = 3) -> SampleSource:
    return SampleSource(iteration, FIRST_AHEAD_SAMPLE + sample)


def drafter(max_tokens: int = 1000) -> AheadDrafter:
    return AheadDrafter(SAMPLES, VOCABULARY, LONGEST, max_tokens)


def guess(ahead: AheadDrafter, response: Sequence[int], *, sample: int = 2, longest: int = 4) -> list[int]:
    text = np.concatenate([PROMPT, tokens(response)])
    (draft,) = ahead.draft([DraftRequest(SampleKey(3, sample, 1), text, len(PROMPT), longest)])
    found: list[int] = draft.tokens.tolist()
    return found


def begin(ahead: AheadDrafter, iteration: int) -> None:
    ahead.begin(SampleRequest(SampleKey(iteration, 0, 1), PROMPT, 1, LONGEST))


def test_it_drafts_until_the_response_differs_and_never_again_for_that_sample() -> None:
    ahead = drafter()
    assert isinstance(ahead, Drafter)
    assert isinstance(ahead, LearnsSiblings)
    ahead.learn(GROUP, source(2), 0, tokens([1, 2, 3, 4, 5, 6]))
    assert guess(ahead, []) == [1, 2, 3, 4]
    assert guess(ahead, [1, 2, 3]) == [4, 5, 6]
    assert guess(ahead, [], sample=1) == [], "of another sample"
    assert guess(ahead, [1, 2, 3, 4, 9]) == []
    assert guess(ahead, [1, 2, 3, 4, 9, 6]) == []
    ahead.learn(GROUP, source(1), 0, tokens([1, 2]))
    assert guess(ahead, [1, 2], sample=1) == [], "nothing is left"


def test_tokens_that_come_late_are_taken_up() -> None:
    ahead = drafter()
    ahead.learn(GROUP, source(2), 0, tokens([1, 2]))
    assert guess(ahead, [1, 2, 3]) == []
    ahead.learn(GROUP, source(2), 1, tokens([2, 3, 4, 5]))
    assert guess(ahead, [1, 2, 3]) == [4, 5]
    assert ahead.held_tokens == 5


@pytest.mark.parametrize(
    ("offset", "learned"),
    [(1, [7]), (-1, [7]), (0, [VOCABULARY]), (0, [-1]), (0, [1] * (LONGEST + 1)), (0, [1] * 11)],
    ids=["gap", "before the start", "outside the vocabulary", "negative", "too long", "no room"],
)
def test_tokens_out_of_bounds_are_counted_and_ignored(offset: int, learned: list[int]) -> None:
    ahead = drafter(max_tokens=10)
    ahead.learn(GROUP, source(2), offset, tokens(learned))
    assert guess(ahead, []) == []
    assert (ahead.held_tokens, ahead.refused_tokens) == (0, len(learned))


def test_tokens_of_siblings_are_no_draft_of_the_sample() -> None:
    ahead = drafter()
    ahead.learn(GROUP, SampleSource(3, 2), 0, tokens([1, 2, 3]))
    assert guess(ahead, []) == []


def test_drafts_go_with_their_prompt_or_with_their_iteration() -> None:
    ahead = drafter()
    ahead.learn(GROUP, source(2), 0, tokens([1, 2]))
    ahead.learn(OTHER, source(SAMPLES), 0, tokens([3]))
    ahead.forget(GROUP)
    assert guess(ahead, []) == []
    assert guess(ahead, [], sample=SAMPLES) == [3]
    begin(ahead, 3)
    assert ahead.held_tokens == 1
    begin(ahead, 4)
    assert ahead.held_tokens == 0


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 12), st.lists(st.integers(0, 3), max_size=9)), max_size=30))
def test_it_never_has_more_than_its_bound_and_drafts_only_what_it_learned(
    learned: list[tuple[int, int, list[int]]],
) -> None:
    ahead, texts = drafter(max_tokens=30), dict[int, list[int]]()
    for sample, offset, values in learned:
        ahead.learn(PromptGroup(3, sample // SAMPLES), source(sample), offset, tokens(values))
        text = texts.setdefault(sample, [])
        more = values[max(0, len(text) - offset) :]
        fits = sum(map(len, texts.values())) + len(more) <= 30
        if values and offset <= len(text) and fits:
            text += more
        assert ahead.held_tokens == sum(map(len, texts.values())) <= 30
    for sample, text in texts.items():
        for place in range(len(text) + 1):
            assert guess(ahead, text[:place], sample=sample, longest=3) == text[place : place + 3]


@pytest.mark.parametrize("ways", [{"deterministic": True}, {}], ids=["deterministic", "fast"])
def test_a_sample_decoded_ahead_has_the_tokens_of_the_sample_and_the_speculator_does_not_hear_of_it(
    ways: dict[str, Any], make_engine: MakeEngine
) -> None:
    class Listening:
        """Records what an engine tells its speculator; it never drafts."""

        def __init__(self) -> None:
            self.heard: list[str] = []

        def __getattr__(self, name: str) -> Any:
            def listen(*_: Any) -> bool:
                self.heard.append(name)
                return False

            return listen

    samples = requests(6, seed=3, response=20)
    ahead = [replace(item, key=SampleKey(1, FIRST_AHEAD_SAMPLE + item.key.sample, 1)) for item in samples]
    engine, speculator = make_engine(**ways, slots=4), Listening()
    engine.draft_by(speculator)
    drafted = finish(engine, ahead)
    assert speculator.heard == []
    decoded = finish(engine, samples)
    assert speculator.heard
    for number, response in decoded.items():
        draft = drafted[FIRST_AHEAD_SAMPLE + number]
        assert draft.tokens.tolist() == response.tokens.tolist()
        if ways:
            assert same_bits(draft, response)
