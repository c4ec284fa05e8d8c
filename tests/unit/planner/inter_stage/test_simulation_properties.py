"""Invariants of any iteration: work is conserved, limits hold, and no chosen plan is worse than none."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator import random_iterations as make

from rlhf_planner.inter_stage.choose import MAX_DRAWS, TIE, choose
from rlhf_planner.inter_stage.costs import StageCosts, Transfer
from rlhf_planner.inter_stage.fitted_costs import PassFormula, StepTime
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.simulate import simulate

TRANSFERS = st.sampled_from(("Auto", "KV", "Tokens"))


@settings(deadline=None, max_examples=60)
@given(make.iterations(), make.costs(), st.integers(0, 45), st.integers(1, 7), TRANSFERS)
def test_all_samples_are_decoded_and_scored_once_within_the_limits(
    iteration: tuple[list[int], IterationSetup], costs: StageCosts, threshold: int, pool: int, transfer: Transfer
) -> None:
    lengths, layout = iteration
    forecast = simulate(lengths, layout, costs, threshold, pool, transfer, spans=True)
    steps = [costs.decode_seconds(1, prompt) * length for prompt, length in zip(layout.prompts, lengths, strict=True)]
    assert all(finished >= alone * (1 - 1e-9) for finished, alone in zip(forecast.finished, steps, strict=True))
    assert forecast.generation_seconds == pytest.approx(max(forecast.finished))
    assert sum(span.samples for span in forecast.spans if span.kind == "score") == layout.batch
    assert all(span.samples <= costs.max_batch_size for span in forecast.spans if span.kind == "decode")
    assert forecast.moved <= max(threshold, 0)
    assert len({move.sample for move in forecast.transits}) == forecast.moved
    assert all(0 <= share <= 1 for share in forecast.idle)
    for span in forecast.spans:
        if span.kind == "score" and span.worker < layout.generation_workers:
            released = forecast.released[span.worker]
            assert released is not None
            assert span.start >= released - 1e-9


@settings(deadline=None, max_examples=30)
@given(make.iterations(), make.costs())
def test_threshold_0_and_a_pool_of_all_workers_are_both_off(
    iteration: tuple[list[int], IterationSetup], costs: StageCosts
) -> None:
    lengths, layout = iteration
    off = simulate(lengths, layout, costs)
    assert simulate(lengths, layout, costs, 0, 1) == off
    assert simulate(lengths, layout, costs, 10, layout.generation_workers) == off
    assert off.moved == 0
    assert off.threshold == 0


@settings(deadline=None, max_examples=40)
@given(make.iterations(), make.costs())
def test_a_worker_does_one_thing_at_a_time(iteration: tuple[list[int], IterationSetup], costs: StageCosts) -> None:
    lengths, layout = iteration
    forecast = simulate(lengths, layout, costs, max(1, layout.batch // 3), 1, "Tokens", spans=True)
    for worker in range(layout.generation_workers + layout.inference_workers):
        own = sorted(
            (span for span in forecast.spans if span.worker == worker), key=lambda span: (span.start, span.end)
        )
        for earlier, later in itertools.pairwise(own):
            assert later.start >= earlier.end - 1e-9, (earlier, later)


@settings(deadline=None, max_examples=20)
@given(make.iterations(), make.costs(), st.integers(0, 3))
def test_auto_is_never_worse_than_off_and_repeats_itself(
    iteration: tuple[list[int], IterationSetup], costs: StageCosts, seed: int
) -> None:
    lengths, layout = iteration
    model = LengthModel(200).with_batch(zip(layout.prompts, lengths, strict=True))
    choice = choose(model, layout, costs, seed)
    assert choice.seconds <= choice.off_seconds
    assert choice == choose(model, layout, costs, seed)
    assert choice.fused == (choice.pool < layout.generation_workers)
    assert choice.curve[0] == (0, layout.generation_workers, choice.off_seconds)
    least = costs.least_pool(choice.threshold, max(layout.prompts) + 200)
    assert not choice.fused or least <= choice.pool


def test_auto_finds_what_trying_everything_finds() -> None:
    costs = StageCosts.measured(
        decode=[StepTime(1, 1, 1.0), StepTime(4, 1, 1.3)], max_batch_size=4,
        tasks={"reward": [StepTime(1, 1, 12.0)]}, score_batch=1, command_seconds=0.1,
    )  # fmt: skip
    for seed in range(4):
        # One length a prompt length: what is drawn is what there was.
        generator = np.random.default_rng(seed)
        lengths = [int(value) for value in generator.choice([4, 6, 8, 40], 12, p=[0.4, 0.3, 0.2, 0.1])]
        layout = IterationSetup(3, 0, (1,) * 12)
        model = LengthModel(40).with_batch((1, length) for length in lengths)
        choice = choose(model, layout, costs, seed)
        drawn = np.random.default_rng(seed)
        seconds_of: dict[tuple[int, int], float] = dict.fromkeys(itertools.product(range(12), (1, 2)), 0.0)
        for _ in range(MAX_DRAWS):
            draw = model.draw(drawn, layout.prompts)
            for plan in seconds_of:
                seconds_of[plan] += simulate(draw, layout, costs, *plan, model=model).seconds / MAX_DRAWS
        best = min(seconds_of.values())
        assert choice.off_seconds == pytest.approx(seconds_of[0, 1])
        assert choice.seconds == pytest.approx(seconds_of[choice.threshold, min(2, choice.pool)])
        assert choice.seconds <= best * (1 + TIE) + 1e-9, (seed, choice, best)


def test_modes_other_than_auto_do_as_they_say() -> None:
    costs = StageCosts.measured(decode=[StepTime(1, 1, 1.0)], max_batch_size=8, tasks={"r": [StepTime(1, 1, 5.0)]})
    model, layout = LengthModel.prior(64), IterationSetup(4, 0, (5,) * 32)
    assert choose(model, replace(layout, mode="Disabled"), costs).threshold == 0
    fixed = choose(model, replace(layout, mode="Fixed", threshold=5, pool=2), costs)
    assert (fixed.threshold, fixed.pool) == (5, 2)
    assert not choose(model, replace(layout, mode="Fixed", threshold=5, pool=4), costs).fused
    assert not choose(model, IterationSetup(1, 0, (5,) * 32), costs).fused
    waiting = choose(model, replace(layout, overlap=False), costs)
    assert not waiting.fused
    assert "before the whole batch is generated" in waiting.reason
    with pytest.raises(ValueError, match="threshold and pool must be given"):
        IterationSetup(4, 0, (5,), mode="Fixed")


def test_where_scoring_costs_nothing_fusion_is_off() -> None:
    costs = StageCosts.measured(decode=[StepTime(1, 1, 1.0), StepTime(8, 1, 2.0)], max_batch_size=8)
    choice = choose(LengthModel.prior(64), IterationSetup(4, 0, (5,) * 32), costs)
    assert not choice.fused
    assert "no fusion" in choice.reason


def test_where_scoring_costs_as_much_as_the_tail_fusion_wins() -> None:
    # Two of 32 samples go on for 380 steps (7.6 s) after the others; 32 scores of 1 s are 8 s on four workers.
    costs = StageCosts.measured(decode=[StepTime(1, 1, 0.02)], max_batch_size=8, score_batch=1)
    costs = replace(costs, score=PassFormula(per_sample=1.0))
    model = LengthModel(512).with_batch([(5, 20)] * 30 + [(5, 400)] * 2)
    choice = choose(model, IterationSetup(4, 0, (5,) * 32), costs)
    assert choice.fused
    assert choice.off_seconds / choice.seconds > 1.3
    assert Counter(point.threshold for point in choice.curve).most_common(1)[0][1] == 1


def test_a_gain_of_two_percent_is_left_alone() -> None:
    # As above, but scoring all is 0.2 s: what the simulation leaves out may be as much.
    costs = StageCosts.measured(decode=[StepTime(1, 1, 0.02)], max_batch_size=8, score_batch=1)
    model = LengthModel(512).with_batch([(5, 20)] * 30 + [(5, 400)] * 2)
    choice = choose(model, IterationSetup(4, 0, (5,) * 32), replace(costs, score=PassFormula(per_sample=0.025)))
    best = min(choice.curve, key=lambda point: point.seconds)
    assert 0.01 < 1 - best.seconds / choice.off_seconds < 0.03
    assert not choice.fused


@pytest.mark.parametrize("seed", range(4))
def test_of_equal_thresholds_one_that_moves_little_is_taken_and_not_the_least(seed: int) -> None:
    # Two workers: whatever gathers the last tenth of the batch or more is as good, for one worker scores meanwhile.
    decode = [StepTime(b, c, 0.0026 + b * 2.2e-5 + b * c * 1e-7) for b in (1, 48) for c in (64, 1024)]
    score = [StepTime(1, tokens, 0.004 + tokens * 0.0005) for tokens in (64, 512, 1024)]
    costs = StageCosts.measured(decode=decode, max_batch_size=48, tasks={"reference": score})
    generator = np.random.default_rng(seed)
    long = generator.random((8, 96)) < 1 / 15
    batches = np.where(long, generator.geometric(1 / 560, long.shape), generator.geometric(1 / 28, long.shape))
    model = LengthModel(1024)
    for batch in batches:
        model = model.with_batch((3, min(1024, int(length))) for length in batch)
    choice = choose(model, IterationSetup(2, 0, (3,) * 96), costs, seed)
    least = min(point.seconds for point in choice.curve)
    equal = [point.threshold for point in choice.curve if point.seconds <= least * (1 + TIE)]
    assert len(equal) >= 3
    assert equal[0] < choice.threshold < equal[-1]
    assert choice.threshold <= 96 // 3


def test_impossible_lengths_are_refused() -> None:
    costs = StageCosts.measured(decode=[StepTime(1, 1, 1.0)], max_batch_size=8)
    with pytest.raises(ValueError, match="lengths has 1 samples, the setup 2"):
        simulate([1], IterationSetup(1, 1, (1, 1)), costs)
    with pytest.raises(ValueError, match="at least 1"):
        simulate([1, 0], IterationSetup(1, 1, (1, 1)), costs)
