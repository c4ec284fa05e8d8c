"""The measurement covers the planner's grid in bounded time, and does not change samples in progress."""

from collections.abc import Generator
from typing import Any

import pytest
from tests.support.workers.engine_driving import MakeEngine, finish, requests, same_bits

from rlhf_common.samples import ResponsePart
from rlhf_workers.generation.engine import EngineCosts, EngineLimits
from rlhf_workers.generation.torch_engine import decode_costs


def drain(steps: "Generator[None, None, EngineCosts]") -> EngineCosts:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: EngineCosts = stop.value
            return result


@pytest.mark.parametrize("deterministic", [False, True])
def test_samples_held_meanwhile_are_decoded_to_the_same_bits(deterministic: bool, make_engine: MakeEngine) -> None:
    samples = requests(5, seed=2)
    undisturbed = finish(make_engine(deterministic=deterministic), samples)
    engine = make_engine(deterministic=deterministic)
    engine.submit(samples)
    done: dict[int, ResponsePart] = {}
    for _ in engine.measure():
        done |= {response.key.sample: response for response in engine.step().finished}
    done |= finish(engine)
    assert all(same_bits(response, done[number]) for number, response in undisturbed.items())


def test_the_grid_is_whole_where_time_allows(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_costs, "BUDGET_SECONDS", 60.0)
    costs = drain(make_engine(slots=6).measure())
    assert {cost.batch for cost in costs.decode} == {1, 2, 4, 6}
    assert len({cost.tokens for cost in costs.decode}) == 4
    assert {cost.batch for cost in costs.prefill} == {1, 4, 6}
    assert all(cost.seconds > 0 for cost in (*costs.decode, *costs.prefill))
    assert (costs.max_batch_size, costs.replays, costs.kv_room_bytes) == (6, False, 0)
    assert costs.kv_bytes_per_token == 256
    assert drain(make_engine(deterministic=True).measure()).replays


def test_time_is_bounded_and_the_corners_are_seen(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_costs, "BUDGET_SECONDS", 0.0)
    costs = drain(make_engine(slots=8).measure())
    assert [cost.batch for cost in costs.decode] == [1, 8, 1, 8]
    assert len({cost.tokens for cost in costs.decode}) == 2, "from one context alone nothing is known of others"
    assert len({cost.tokens for cost in costs.prefill}) == len(costs.prefill) == 2


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 1, 5), (64, 8, 12), (100, 2048, 6144)])
def test_every_point_of_the_grid_fits_the_engine(sizes: Any, tiled: bool) -> None:
    limits = EngineLimits(*sizes)
    grid = decode_costs.decode_grid(limits, tiled=tiled)
    assert grid[0][0] == 1
    assert len(grid) == len(set(grid))
    assert {batch for batch, _ in grid} >= {1, limits.max_batch_size}
    longest = limits.max_prompt_tokens + limits.max_response_tokens
    assert all(context + decode_costs.STEPS < longest or context == 1 for _, context in grid)


def test_deterministic_points_are_whole_tiles_in_the_middle_of_a_bucket() -> None:
    grid = decode_costs.decode_grid(EngineLimits(48, 16, 1008), tiled=True)
    assert {batch for batch, _ in grid} == {1, 16, 32, 48}
    assert [context for batch, context in grid if batch == 1] == [384, 48, 768, 192]
    assert grid[:4] == [(1, 384), (48, 384), (1, 48), (48, 48)]
