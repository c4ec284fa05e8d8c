"""The tail's workers and moves: no sample is lost or duplicated, and no worker gets more than it can take."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator import random_iterations as make

from rlhf_planner.inter_stage.balance import balance as reallocations
from rlhf_planner.inter_stage.costs import StageCosts, Transfer
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.tail_placement import Move, TailSample, place_tail

TRANSFERS = st.sampled_from(("Auto", "KV", "Tokens"))
LENGTHS = LengthModel.prior(200)


def balance(*question: Any, **more: Any) -> tuple[Move, ...]:
    return tuple(move for together in reallocations(*question, **more) for move in together.moves)


def after(tails: dict[str, list[TailSample]], moves: tuple[Move, ...]) -> dict[str, list[TailSample]]:
    where = {sample.sample: (name, sample) for name, samples in tails.items() for sample in samples}
    for move in moves:
        name, sample = where[move.sample]
        assert name == move.source != move.destination
        where[move.sample] = (move.destination, sample)
    answer: dict[str, list[TailSample]] = {name: [] for name in tails}
    for name, sample in where.values():
        answer[name].append(sample)
    return answer


def limit_of(costs: StageCosts, samples: list[TailSample]) -> int:
    longest = max((sample.prompt_tokens for sample in samples), default=1) + LENGTHS.max_tokens
    return min(costs.max_batch_size, costs.kv_rows(longest))


@settings(deadline=None, max_examples=80)
@given(make.held_samples(), st.integers(1, 6), make.costs(), TRANSFERS)
def test_every_sample_ends_in_one_place_of_the_pool_within_its_limits(
    tails: dict[str, list[TailSample]], pool: int, costs: StageCosts, transfer: Transfer
) -> None:
    placement = place_tail(tails, pool, costs, LENGTHS, transfer)
    assert len({move.sample for move in placement.moves}) == len(placement.moves)
    assert min(pool, len(tails)) <= len(placement.pool) <= len(tails)
    now = after(tails, placement.moves)
    assert all(name in placement.pool for name, samples in now.items() if samples)
    everything = [sample for samples in tails.values() for sample in samples]
    for name in {move.destination for move in placement.moves}:
        assert len(now[name]) <= limit_of(costs, everything)
    if transfer == "Tokens" or costs.bandwidth is None:
        assert not any(move.kv for move in placement.moves)
    assert place_tail(dict(reversed(tails.items())), pool, costs, LENGTHS, transfer) == placement


@settings(deadline=None, max_examples=60)
@given(make.held_samples(), make.costs(), TRANSFERS)
def test_balance_moves_each_sample_once_within_the_limits_and_stops(
    tails: dict[str, list[TailSample]], costs: StageCosts, transfer: Transfer
) -> None:
    moves = balance(tails, costs, LENGTHS, transfer)
    assert len({move.sample for move in moves}) == len(moves)
    now = after(tails, moves)
    for name in {move.destination for move in moves}:
        assert len(now[name]) <= limit_of(costs, now[name])
    assert balance(tails, costs, LENGTHS, transfer, resting=tails) == ()


def flat(**others: object) -> StageCosts:
    decode = [StepTime(1, 1, 1.0), StepTime(8, 1, 1.07)]
    return StageCosts.measured(decode=decode, max_batch_size=8, **others)  # type: ignore[arg-type]


def unfinished(first: int, *tokens: int) -> list[TailSample]:
    return [TailSample(first + index, 10, count) for index, count in enumerate(tokens)]


def test_the_workers_with_the_most_predicted_work_stay() -> None:
    # Of those that have gone on for 100 tokens, 100 more are expected on average; of new ones 20.
    lengths = LengthModel(200).with_batch([(10, 20)] * 90 + [(10, 200)] * 10)
    tails = {"a": unfinished(0, 0, 0), "b": unfinished(2, 100), "c": unfinished(3)}
    assert place_tail(tails, 1, flat(), lengths).pool == ("b",)
    assert [move.sample for move in place_tail(tails, 1, flat(), lengths).moves] == [0, 1]


def test_the_kv_cache_goes_along_where_that_is_faster() -> None:
    tails = {"a": unfinished(0, 50, 50), "b": unfinished(2, 50)}
    prefill = [StepTime(1, 10, 1.0), StepTime(1, 60, 6.0)]  # a move waits for five steps of 1 s
    fast = flat(prefill=prefill, kv_bytes_per_token=1.0, bandwidth=1e6)
    slow = flat(prefill=prefill, kv_bytes_per_token=1.0, bandwidth=10.0)
    assert [move.kv for move in place_tail(tails, 1, fast, LENGTHS).moves] == [True]
    assert [move.kv for move in place_tail(tails, 1, slow, LENGTHS).moves] == [False]
    assert [move.kv for move in place_tail(tails, 1, slow, LENGTHS, "KV").moves] == [True]
    unheard = {"a": unfinished(0, 50, 50), "b": unfinished(2, 0)}
    assert [move.kv for move in place_tail(unheard, 1, fast, LENGTHS).moves] == [False]
    assert [move.kv for move in place_tail(unheard, 1, fast, LENGTHS, "KV").moves] == [True], (
        "what is known lags behind"
    )
    replayed = flat(prefill=prefill, kv_bytes_per_token=1.0, bandwidth=10.0, replays=True)
    assert [move.kv for move in place_tail(tails, 1, replayed, LENGTHS).moves] == [True]  # 50 steps of 1 s against 11 s


def test_a_pool_that_cannot_hold_the_tail_is_enlarged() -> None:
    tails = {"a": unfinished(0, *[5] * 8), "b": unfinished(8, *[5] * 8), "c": unfinished(16, 5)}
    assert place_tail(tails, 1, flat(), LENGTHS).pool == ("a", "b", "c")
    tails["b"].pop()
    assert place_tail(tails, 1, flat(), LENGTHS).pool == ("a", "b")


def test_impossible_questions_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="no generation workers"):
        place_tail({}, 1, flat(), LENGTHS)
    with pytest.raises(ValueError, match="pool is 0"):
        place_tail({"a": []}, 0, flat(), LENGTHS)
    with pytest.raises(ValueError, match="sample 3 is listed twice"):
        place_tail({"a": unfinished(3, 1), "b": unfinished(3, 1)}, 1, flat(), LENGTHS)


def test_a_worker_that_would_run_dry_takes_what_waits_on_a_full_one() -> None:
    steep = StageCosts.measured(decode=[StepTime(1, 1, 1.0), StepTime(4, 1, 4.0)], max_batch_size=4)
    tails = {"a": unfinished(0, *[0] * 6), "b": [], "c": unfinished(6, 0)}
    moves = balance(tails, steep, LENGTHS)
    assert moves
    assert {move.source for move in moves} == {"a"}
    assert moves[0].destination == "b"
    assert not any(move.kv for move in moves), "nothing is known to be cached"
    linked = replace(steep, bandwidth=1e6)
    assert all(move.kv for move in balance(tails, linked, LENGTHS, "KV")), "what is known lags behind"


def test_where_a_batch_costs_nothing_balance_moves_nothing() -> None:
    tails = {"a": unfinished(0, 5, 5, 5, 5), "b": []}
    assert balance(tails, flat(), LENGTHS) == ()
