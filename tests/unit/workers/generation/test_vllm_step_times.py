"""The share of a step's time that counts as prefill, from which costs are learned."""

from hypothesis import given
from hypothesis import strategies as st

from rlhf_workers.generation.vllm_engine.step_times import StepTimes

COUNTS = st.integers(0, 5000)


def test_what_a_mixed_step_takes_beyond_decoding_is_prefill() -> None:
    times = StepTimes()
    assert times.prefill_ns(900, prefilled=30, rows=0) == 900, "nothing was decoded"
    assert times.prefill_ns(800, prefilled=30, rows=10) == 600, "tokens share the time until decoding alone was timed"
    assert times.prefill_ns(100, prefilled=0, rows=10) == 0
    assert times.prefill_ns(800, prefilled=30, rows=10) == 700
    assert times.prefill_ns(50, prefilled=2, rows=10) == 1, (
        "a step may be quicker than the last; it is no less a prefill"
    )


@given(st.lists(st.tuples(st.integers(1, 10**9), COUNTS, COUNTS)))
def test_the_part_is_within_the_step_and_never_nothing_where_something_was_prefilled(
    steps: list[tuple[int, int, int]],
) -> None:
    times = StepTimes()
    for step_ns, prefilled, rows in steps:
        part = times.prefill_ns(step_ns, prefilled, rows)
        assert 0 <= part <= step_ns
        assert bool(part) == bool(prefilled)
