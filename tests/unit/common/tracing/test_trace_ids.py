"""Trace ids are the same in every process, and the sampled share is the configured one."""

import pytest

from rlhf_common.tracing.span import is_sampled, iteration_trace, span_id, trace_id, trace_words


def test_ids_follow_from_what_they_are_about() -> None:
    assert trace_id("run", "iteration", 3) == trace_id("run", "iteration", 3)
    ids = {trace_id(run, "iteration", number) for run in ("a", "b") for number in range(100)}
    assert len(ids) == 200
    assert all(0 < number < 2**128 for number in ids)
    trace = trace_id("a", "iteration", 0)
    assert 0 < span_id(trace, "sample", 1) < 2**64
    assert span_id(trace, "sample", 1) != span_id(trace, "sample", 11)


def test_a_trace_is_written_with_all_its_digits() -> None:
    assert trace_words(1) == "0" * 31 + "1"
    assert iteration_trace("run", 3) == trace_words(trace_id("run", "iteration", 3))
    assert iteration_trace("", 3) == "", "a run without traces"


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.25, 200, 300), (1.0, 1000, 1000)])
def test_a_share_of_samples_is_told_and_always_the_same_ones(share: float, least: int, most: int) -> None:
    trace = trace_id("run", "iteration", 0)
    traced = [index for index in range(1000) if is_sampled(trace, share, index)]
    assert least <= len(traced) <= most
    assert traced == [index for index in range(1000) if is_sampled(trace, share, index)]
    assert set(traced) <= {index for index in range(1000) if is_sampled(trace, min(1.0, 2 * share), index)}
