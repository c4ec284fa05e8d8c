"""Small iterations with times computed by hand."""

from dataclasses import replace

import pytest

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import DecodeLines, PassFormula, StepTime
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.learned_costs import ObservedWork, refined
from rlhf_planner.inter_stage.simulate import simulate


def costs(**others: object) -> StageCosts:
    """A step takes 1 s per row, a score 10 s per sample; other costs are zero unless given."""
    decode = DecodeLines.fitted([StepTime(1, 1, 1.0), StepTime(4, 1, 4.0)])
    base = StageCosts(decode, 4, score=PassFormula(per_sample=10.0), score_batch=1, command_seconds=0.0)
    return replace(base, **others)  # type: ignore[arg-type]


def test_without_dedicated_inference_workers_scoring_follows_generation() -> None:
    # Worker 0 decodes samples 0 and 2: 2 steps of two rows, then 3 of one: 7 s. Worker 1: sample 1, 5 s.
    # Then 3 scores of 10 s on 2 workers: 20 s.
    forecast = simulate([2, 5, 5], IterationSetup(2, 0, (1, 1, 1)), costs())
    assert forecast.finished == pytest.approx((4, 5, 7))
    assert (forecast.generation_seconds, forecast.seconds) == pytest.approx((7, 27))
    assert forecast.released == pytest.approx((7, 7))


def test_a_dedicated_inference_worker_scores_while_others_decode() -> None:
    forecast = simulate([2, 5, 5], IterationSetup(2, 1, (1, 1, 1)), costs())
    assert forecast.seconds == pytest.approx(34)  # from 4 s on, one after the other
    assert forecast.released == (None, None)
    waiting = simulate([2, 5, 5], IterationSetup(2, 1, (1, 1, 1), overlap=False), costs())
    assert waiting.seconds == pytest.approx(37)


def test_samples_beyond_the_batch_of_a_worker_wait_for_a_row() -> None:
    forecast = simulate([1, 3, 2], IterationSetup(1, 1, (1, 1, 1)), costs(), 0)
    assert forecast.finished == pytest.approx((3, 6, 5))
    decode = [StepTime(1, 1, 1.0)]
    one_row = StageCosts.measured(decode=decode, max_batch_size=1)
    assert simulate([1, 3, 2], IterationSetup(1, 1, (1, 1, 1)), one_row).finished == pytest.approx((1, 4, 6))


def test_fused_one_worker_keeps_the_tail_and_the_other_scores() -> None:
    plan = IterationSetup(2, 0, (1, 1))
    forecast = simulate([3, 10], plan, costs(), 1, 1)
    # Each on its own worker: sample 0 ends at 3 s, worker 0 is free; worker 1 keeps sample 1 until 10 s.
    assert forecast.finished == pytest.approx((3, 10))
    assert forecast.released == pytest.approx((3, 10))
    assert forecast.seconds == pytest.approx(20)  # sample 0 scored 3..13, sample 1 10..20
    assert simulate([3, 10], plan, costs()).seconds == pytest.approx(20)  # 10..20 both


def test_a_tail_that_is_decoded_beside_scoring_takes_longer_for_as_long_as_that_goes_on() -> None:
    plan = IterationSetup(2, 0, (1, 1))
    alone = [ObservedWork("decode", 10, rows, 1, 10.0 * rows) for rows in (1, 2, 3, 4)]
    half_as_fast = refined(costs(), [*alone, ObservedWork("decode", 10, 1, 1, 20.0, contended=0.9)])
    assert half_as_fast.contention_ratio == pytest.approx(2)
    # 20 s of scoring are left at 3 s: all of the tail's 7 steps take 2 s each.
    forecast = simulate([3, 10], plan, half_as_fast, 1, 1)
    assert forecast.finished == pytest.approx((3, 17))
    assert forecast.released == pytest.approx((3, 17))
    assert simulate([3, 10], plan, half_as_fast).finished == pytest.approx((3, 10)), "nobody scores then"
    # 2 s of scoring: the first step of the tail takes 2 s, the other six 1 s.
    short = replace(half_as_fast, score=PassFormula(per_sample=1.0))
    assert simulate([3, 10], plan, short, 1, 1).finished == pytest.approx((3, 11))


def test_tokens_that_move_are_prefilled_again_and_replays_are_decoded_again() -> None:
    # Two workers, two samples each: 0, 2 on worker 0 and 1, 3 on worker 1; at 4 s samples 0 and 1 are finished.
    # Worker 0 stays, sample 3 joins sample 2, both after 2 of 4 steps.
    plan = IterationSetup(2, 0, (1, 1, 1, 1))
    forecast = simulate([2, 2, 4, 4], plan, costs(), 2, 1)
    assert forecast.moved == 1
    assert forecast.finished == pytest.approx((4, 4, 8, 8))
    replayed = simulate([2, 2, 4, 4], plan, costs(replays=True), 2, 1)
    assert replayed.finished == pytest.approx((4, 4, 8, 10))  # two rows twice, then two steps of one row
    link = costs(bandwidth=3.0, kv_bytes_per_token=1.0, setup_seconds=0.0, move_steps=0)
    sent = simulate([2, 2, 4, 4], plan, link, 2, 1, "KV")
    # 3 keys in 1 s; meanwhile both workers make one more step: then one step of two rows.
    assert sent.finished == pytest.approx((4, 4, 7, 7))
    assert sent.moved_by_kv == 1
    assert sent.moved_bytes == 3
    assert sent.released[1] == pytest.approx(5)
