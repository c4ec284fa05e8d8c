"""What a coordinator learns of the time in which steps were made."""

from hypothesis import given
from hypothesis import strategies as st

from rlhf_coordinator.fusion.learning import beside_scoring
from rlhf_coordinator.state.fusion_state import WorkInterval
from rlhf_planner.inter_stage.corrections import Observed

STEPS = Observed("decode", 10, 4, 100, 1.0)
SPAN = st.tuples(st.integers(1, 50), st.integers(1, 20))


@given(st.lists(SPAN, max_size=8), SPAN)
def test_a_span_is_beside_scoring_for_as_long_as_anybody_scores_in_it(
    scored: list[tuple[int, int]], decoded: tuple[int, int]
) -> None:
    spans = [WorkInterval(f"generation-{number}", start, start + long) for number, (start, long) in enumerate(scored)]
    start, long = decoded
    (told,) = beside_scoring([(WorkInterval("generation-9", start, start + long), STEPS)], spans)
    moments = sum(any(one.start_ns <= at < one.end_ns for one in spans) for at in range(start, start + long))
    assert told == STEPS._replace(beside=moments / long)
