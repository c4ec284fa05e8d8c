"""Uniforms looked up for a whole batch depend only on each sample's key and position."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlhf_workers.generation.sampling import uniforms
from rlhf_workers.generation.vllm_engine.uniform_table import BLOCK, KeyedRequest, UniformTable

MOST_AT_ONCE = 17
REQUESTS = {f"r{number}": KeyedRequest(2**63 + number, 3 * number) for number in range(200)}
Step = list[tuple[int, int, int]]
"""(request, response position, number of positions) of each row."""

steps = st.lists(
    st.lists(
        st.tuples(st.integers(0, 199), st.integers(0, 400), st.integers(1, MOST_AT_ONCE)),
        min_size=1,
        max_size=6,
        unique_by=lambda row: row[0],
    ),
    min_size=1,
    max_size=8,
)


def looked_up(table: UniformTable, step: Step) -> list[float]:
    names = [f"r{number}" for number, _, _ in step]
    lengths = np.array([REQUESTS[f"r{number}"].prompt_tokens + position for number, position, _ in step], np.int32)
    counts = np.array([count for _, _, count in step], np.int64)
    return list(table.rows(names, lengths, counts, REQUESTS.__getitem__).tolist())


def expected(step: Step) -> list[float]:
    return [
        float(uniforms(REQUESTS[f"r{number}"].random_key, 0, 4 * 128)[position + ahead])
        for number, position, count in step
        for ahead in range(count)
    ]


@given(steps)
def test_what_is_looked_up_follows_from_key_and_position_alone(sequence: list[Step]) -> None:
    table = UniformTable()
    for step in sequence:
        assert looked_up(table, step) == expected(step)
        table.forget_others([f"r{number}" for number, _, _ in step])


def test_a_batch_that_stays_is_looked_up_across_the_ends_of_blocks() -> None:
    table = UniformTable()
    for position in range(3 * BLOCK):
        step = [(number, position + number, 1) for number in range(100)]
        assert looked_up(table, step) == expected(step)


def test_the_places_of_requests_that_are_gone_are_used_again_and_are_no_others() -> None:
    table = UniformTable()
    for first in range(0, 200, 10):
        step = [(number, 5, 1) for number in range(first, first + 10)]
        assert looked_up(table, step) == expected(step)
        table.forget_others([f"r{number}" for number, _, _ in step])
        assert len(table) <= 2 * 10 + BLOCK
    again = [(number, 70, 2) for number in range(30)]
    assert looked_up(table, again) == expected(again)
