"""The n-gram drafter guesses the continuation of the longest earlier match in the text."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.workers.generation_roles import generation_job

from rlhf_common.samples import SampleKey
from rlhf_workers.generation.speculation.drafter import MATCHES, MAX_DRAFT, Draft, Drafter, DraftRequest
from rlhf_workers.generation.speculation.drafter_registry import build_drafters
from rlhf_workers.generation.speculation.ngram import NgramDrafter

KEY = SampleKey(0, 0, 0)


def draft(text: list[int], longest: int = 4) -> Draft:
    return NgramDrafter().draft([DraftRequest(KEY, np.array(text, np.int32), 1, longest)])[0]


@pytest.mark.parametrize(
    ("text", "guess", "match"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9, 1], 2),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4], 2),  # the later of two places
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1, 2], 3),  # the longer of two matches
        ([5, 5, 5], [5, 5, 5, 5], 2),
        ([1, 2, 3], [], 0),
        ([1], [], 0),
    ],
)
def test_what_followed_the_longest_repeated_end_is_guessed(text: list[int], guess: list[int], match: int) -> None:
    found = draft(text)
    assert (found.tokens.tolist(), found.match) == (guess, match)


def test_no_token_is_guessed_where_none_is_of_use() -> None:
    assert draft([1, 1, 1], longest=0).tokens.tolist() == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, MAX_DRAFT))
def test_a_guess_is_a_continuation_that_stood_in_the_text(text: list[int], longest: int) -> None:
    found = draft(text, longest)
    guess = found.tokens.tolist()
    repeated = [n for n in range(1, MATCHES) if any(text[at : at + n] == text[-n:] for at in range(len(text) - n))]
    assert len(guess) == (longest if repeated else 0)
    if guess:
        assert found.match == max(repeated)
        whole = text + guess
        end = text[-found.match :]
        starts = [at + found.match for at in range(len(text) - found.match) if text[at : at + found.match] == end]
        assert any(whole[start : start + len(guess)] == guess for start in starts)


def test_the_registry_builds_drafters_by_their_names(tmp_path: Path) -> None:
    names = ["Siblings", "Ngram"]
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 50}')
    drafters = build_drafters(names, generation_job(tmp_path).spec, None, torch.device("cpu"))
    assert [drafter.name for drafter in drafters] == names
    assert all(isinstance(drafter, Drafter) for drafter in drafters)
