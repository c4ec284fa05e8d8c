"""A long tail with drafts, with fusion and with both is predicted as well as without, by the lengths that come out."""

import pytest
from benchmarks.predicted_tail import CASES, errors, summary


@pytest.mark.full(quick=2)
@pytest.mark.parametrize("times", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_a_tail_is_predicted_within_a_tenth_where_its_lengths_are_given(case: str, times: float) -> None:
    """Also of a model so slow that a stretch has a handful of steps."""
    found = summary(errors(case, iterations=15, times=times).lengths_known)
    assert found["median"] < 0.05
    assert -0.1 < found["p10"] <= found["p90"] < 0.1
