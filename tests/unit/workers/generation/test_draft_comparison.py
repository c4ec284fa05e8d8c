"""Drafts that were not followed are judged too, by the tokens at their place."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhf_common.samples import SampleKey
from rlhf_workers.generation.speculation.draft_comparison import DraftComparison
from rlhf_workers.generation.speculation.drafter import Draft, DraftRequest
from rlhf_workers.generation.speculation.ngram import NgramDrafter
from rlhf_workers.generation.speculation.speculator import Speculator, Verified

KEY = SampleKey(0, 0, 0)
LONGEST = 4


def request(*tokens: int) -> DraftRequest:
    return DraftRequest(KEY, np.array(tokens, np.int32), 1, LONGEST)


def draft(match: int, *tokens: int) -> Draft:
    return Draft(np.array(tokens, np.int32), match)


def test_all_drafts_of_a_place_are_judged_by_the_next_request() -> None:
    notes = DraftComparison()
    notes.note((0, 2), [[draft(5, 7, 8, 9)], [draft(99, 7, 1)]], [request(3, 4)])
    duels = notes.compared([request(3, 4, 7, 8, 6)])
    assert duels is not None
    assert [column.tolist() for column in duels] == [[0], [5], [2], [15], [1]], "a match is bounded"
    assert notes.compared([request(3, 4, 7, 8, 6)]) is None, "each once"


def test_a_place_with_one_draft_and_a_sample_that_ended_say_nothing() -> None:
    notes = DraftComparison()
    notes.note((0, 1), [[draft(0, 7)], [draft(0)]], [request(3)])
    notes.note((0,), [[draft(0, 7)]], [request(3)])
    assert notes.compared([request(3, 7)]) is None
    notes.note((0, 1), [[draft(0, 7)], [draft(0, 8)]], [request(3)])
    notes.forget(KEY)
    assert notes.compared([request(3, 7)]) is None


class Says(NgramDrafter):
    """A drafter with one answer, for one match."""

    def __init__(self, name: str, match: int, shift: int) -> None:
        self.name, self._match, self._shift = name, match, shift

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Count on from the last token; every `shift`th number is wrong."""
        drafts = []
        for asked in requests:
            count = int(asked.tokens[-1]) + 1 + np.arange(asked.longest)
            drafts.append(Draft(np.where(count % self._shift == 0, -1, count).astype(np.int32), self._match))
        return drafts


def test_the_drafter_that_is_right_for_longer_is_followed_though_it_was_unlucky_first() -> None:
    wrong_soon, right = Says("Siblings", 0, 2), Says("Ngram", 3, 1000)
    speculator = Speculator(
        [wrong_soon, right], mode="Fixed", longest=LONGEST, widths=np.arange(LONGEST + 2), clock=lambda: 0.0
    )
    # The one that is nearly always right is taken to be wrong, by what is known of it alone.
    unlucky = [np.array([1] * 30), np.array([3] * 30), np.array([LONGEST] * 30), np.array([0] * 30)]
    controller = speculator.controller
    acceptance = controller.acceptance.observed(*unlucky)
    speculator.controller = replace(controller, acceptance=acceptance)
    tokens, drafted = [0], []
    while len(tokens) < 200:
        assert speculator.wants(1, len(tokens))
        said = speculator.propose([request(*tokens)], len(tokens))[0].tolist()
        accepted = 0
        while accepted < len(said) and said[accepted] == tokens[-1] + 1 + accepted:
            accepted += 1
        tokens += [tokens[-1] + 1 + at for at in range(accepted + 1)]
        drafted.append(accepted)
        speculator.verified([Verified(KEY, len(said), accepted)], 1 + len(said), len(tokens), 1e-5, 1e-2)
    assert np.mean(drafted[-20:]) > LONGEST - 1
