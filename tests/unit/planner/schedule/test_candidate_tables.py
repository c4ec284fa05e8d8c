"""From measured times to a choice: questions to the search, its budget, and when a fused table is worth it."""

import pytest

from rlhf_planner.schedule.candidate_tables import (
    LONGEST_SEARCH,
    SHORTEST_SEARCH,
    StageCost,
    coarse,
    exact_instance,
    forecast,
    search_seconds,
)
from rlhf_planner.schedule.methods import FUSED, FUSED_SPLIT, opposite, pick
from rlhf_planner.schedule.serial import METHOD as SERIAL
from rlhf_planner.schedule.serial import serial_table

PIPES = opposite(("actor", "critic"), 2, 4)
COSTS = {
    (model, stage): StageCost(0.0213 * scale, 0.0437 * scale, 0.0251 * scale, 0.0239 * scale, 1e6 * scale)
    for model, scale in (("actor", 1.0), ("critic", 1.37))
    for stage in range(2)
}
TRANSFERS = {(0, 1): 0.0021}


def test_the_serial_schedule_takes_what_its_formula_says() -> None:
    """(S + M - 1)(f + b) of each model, without transfers; a later model starts as soon as its ranks are free."""
    seconds, rows = forecast(serial_table(PIPES), COSTS, {})
    item = [(2 + 4 - 1) * (COSTS[model, 0].forward + COSTS[model, 0].backward) for model in ("actor", "critic")]
    assert max(item) < seconds <= sum(item) + 1e-9
    assert max(step.end for row in rows for step in row) == pytest.approx(seconds)
    assert forecast(serial_table(PIPES), COSTS, TRANSFERS)[0] > seconds


def test_the_grid_of_the_search_keeps_every_ratio_of_times() -> None:
    for split in (False, True):
        exact = exact_instance(PIPES, COSTS, TRANSFERS, split, room=5e6)
        asked = coarse(exact)
        unit = exact.pipelines[0].forward[0] / asked.pipelines[0].forward[0]
        for fine, rough in zip(exact.pipelines, asked.pipelines, strict=True):
            for name in ("forward", "backward", "weight_gradient", "transfer"):
                for a, b in zip(getattr(fine, name), getattr(rough, name), strict=True):
                    assert b == int(b)
                    assert b * unit == pytest.approx(a, abs=unit)
        assert asked.memory_cap is not None
        assert asked.memory_cap / max(asked.pipelines[1].activation) == pytest.approx(5 / 1.37, rel=0.01)


def test_a_search_takes_a_small_share_of_what_the_job_can_win() -> None:
    exact = exact_instance(PIPES, COSTS, TRANSFERS, False)
    serial = forecast(serial_table(PIPES), COSTS, TRANSFERS)[0]
    assert search_seconds(exact, False, serial, 1) == SHORTEST_SEARCH
    assert SHORTEST_SEARCH < search_seconds(exact, False, serial, 200) < LONGEST_SEARCH
    assert search_seconds(exact, False, serial, 100_000) == LONGEST_SEARCH


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({SERIAL: 1.0, FUSED: 0.8, FUSED_SPLIT: 0.7}, FUSED_SPLIT),
        ({SERIAL: 1.0, FUSED: 0.8, FUSED_SPLIT: 0.9}, FUSED),
        ({SERIAL: 1.0, FUSED: 0.995, FUSED_SPLIT: 1.2}, SERIAL),
        ({SERIAL: 1.0}, SERIAL),
    ],
)
def test_a_fused_table_must_beat_the_serial_one_by_more_than_noise(seconds: dict[str, float], chosen: str) -> None:
    assert pick(seconds) == chosen
