"""Learned statistics of drafts: bounded, unchanged by serialization, and the start of a new controller."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_planner.speculation.acceptance import WINDOW
from rlhf_planner.speculation.controller import DraftController
from rlhf_planner.speculation.learned_drafts import PASSES, Counted, LearnedDrafts, MeanPass
from rlhf_planner.speculation.learned_messages import learned_message, learned_of

cells = st.tuples(st.sampled_from(["Siblings", "Ngram"]), st.integers(0, 15), st.integers(0, 7))
counted = st.tuples(st.integers(0, 3000), st.integers(0, 3000)).map(
    lambda pair: Counted(float(max(pair)), float(min(pair)))
)
amounts = st.floats(0, 4096)
passes = st.builds(MeanPass, st.floats(1, 500), st.floats(1, 4096), amounts, amounts, st.floats(1e-6, 100))
stretches = st.lists(st.tuples(st.dictionaries(cells, counted, max_size=8), st.lists(passes, max_size=6)), max_size=5)


def learned_from(observed: list[tuple[dict[tuple[str, int, int], Counted], list[MeanPass]]]) -> LearnedDrafts:
    learned = LearnedDrafts()
    for counts, passes in observed:
        learned = learned.observed(counts, passes)
    return learned


@given(stretches)
def test_it_is_bounded_and_comes_back_as_it_was_written(
    observed: list[tuple[dict[tuple[str, int, int], Counted], list[MeanPass]]],
) -> None:
    learned = learned_from(observed).aged()
    assert all(0 <= c.accepted <= c.judged <= WINDOW for c in learned.counts.values())
    assert all(item.passes <= PASSES for item in learned.passes.values())
    assert LearnedDrafts.from_document(json.loads(json.dumps(learned.document()))).counts == learned.counts
    assert learned_of(learned_message(learned)).counts == learned.counts
    again = learned_of(learned_message(learned)).passes.values()
    np.testing.assert_allclose(
        sorted(item.seconds for item in again), sorted(item.seconds for item in learned.passes.values())
    )


def test_a_controller_starts_from_what_others_measured() -> None:
    """Drafts of Ngram are right and cheap, those of Siblings never: a new worker drafts with Ngram immediately."""
    counts = {("Ngram", 3, position): Counted(300.0, 290.0) for position in range(4)}
    counts |= {("Siblings", 0, position): Counted(300.0, 0.0) for position in range(4)}
    passes = [MeanPass(20, 2, slots, 200, 0.010 + 0.0001 * slots) for slots in (0, 2, 8)]
    learned = LearnedDrafts().observed(counts, passes)
    fresh = DraftController.new(2, 16, 4, np.arange(65))
    assert fresh.plan(2, 200).reason == "Unmeasured"
    begun = learned.given_to(fresh, ["Siblings", "Ngram"])
    assert begun.plan(2, 200).drafters
    assert begun.acceptance.rates[1, 3, 0] > 0.9
    assert begun.acceptance.rates[0, 0, 0] < 0.1
    assert begun.pass_costs.seconds(2, 0, 200)[0] == pytest.approx(0.010, rel=0.05)
    assert LearnedDrafts().given_to(fresh, ["Siblings", "Ngram"]).plan(2, 200) == fresh.plan(2, 200)


@pytest.mark.parametrize(
    ("counts", "passes"),
    [
        ({("", 0, 0): Counted(1, 1)}, []),
        ({("Ngram", -1, 0): Counted(1, 1)}, []),
        ({("Ngram", 0, 99): Counted(1, 1)}, []),
        ({("Ngram", 0, 0): Counted(1, 2)}, []),
        ({("Ngram", 0, 0): Counted(math.inf, 2)}, []),
        ({("Ngram", 0, 0): Counted(math.nan, 0)}, []),
        ({}, [MeanPass(1, 0, 0, 0, 1)]),
        ({}, [MeanPass(1, 1, 0, 0, 0)]),
        ({}, [MeanPass(1, 1, 0, math.nan, 1)]),
        ({}, [MeanPass(1, 1, 0, 0, 1e9)]),
        ({(f"d{number}", 0, 0): Counted(1, 1) for number in range(20)}, []),
    ],
)
def test_what_cannot_be_is_refused(counts: dict[tuple[str, int, int], Counted], passes: list[MeanPass]) -> None:
    with pytest.raises(ValueError, match=r"must be|must have|more than"):
        LearnedDrafts().observed(counts, passes)


@pytest.mark.parametrize("document", [None, [], {}, {"counts": [[1]], "passes": []}, {"counts": [], "passes": [["a"]]}])
def test_a_document_that_nobody_wrote_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match="learned draft statistics"):
        LearnedDrafts.from_document(document)
