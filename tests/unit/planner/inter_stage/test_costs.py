"""Costs reproduce the measurements and interpolate between them; corrections; serialization."""

import dataclasses
import json
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator import random_iterations as make

from rlhf_planner.inter_stage.costs import Kind, StageCosts
from rlhf_planner.inter_stage.fitted_costs import PassFormula, StepTime
from rlhf_planner.inter_stage.learned_costs import ObservedWork, refined
from rlhf_planner.inter_stage.observed_moves import ObservedMove


def test_measured_times_come_out_again() -> None:
    decode = [StepTime(b, c, 0.01 + 0.001 * b + 1e-5 * b * c) for b in (1, 4, 16) for c in (64, 512)]
    costs = StageCosts.measured(
        decode=decode,
        max_batch_size=32,
        prefill=[StepTime(1, 64, 0.02 + 64e-4), StepTime(4, 64, 0.02 + 256e-4)],
        tasks={"reward": [StepTime(2, 100, 0.1)], "critic": [StepTime(2, 100, 0.3)]},
    )
    for batch, context, seconds in decode:
        assert costs.decode_seconds(batch, context) == pytest.approx(seconds)
    assert costs.decode_seconds(10, 256) == pytest.approx(0.01 + 0.01 + 0.0256)
    assert costs.decode_seconds(32, 64) == pytest.approx(0.01 + 0.032 + 0.02048)
    assert costs.prefill_seconds(2, 64) == pytest.approx(0.02 + 128e-4)
    assert costs.score_seconds(2, 100) == pytest.approx(0.4)


def test_a_batch_seen_at_one_context_only_grows_with_context_as_its_neighbours_do() -> None:
    def seconds(batch: int, context: int) -> float:
        return 0.01 + 0.001 * batch + 1e-5 * batch * context

    seen = [(1, 64), (1, 256), (8, 256), (16, 64), (16, 256)]
    costs = StageCosts.measured(decode=[StepTime(b, c, seconds(b, c)) for b, c in seen], max_batch_size=16)
    assert costs.decode_seconds(8, 1024) == pytest.approx(seconds(8, 1024), rel=0.01)
    alone = StageCosts.measured(decode=[StepTime(1, 256, 1.0)], max_batch_size=4)
    assert alone.decode_seconds(4, 1024) == 1.0


def test_a_larger_batch_never_takes_less_whatever_the_noise() -> None:
    slow = {(1, 512): 2.4, (4, 512): 1.9, (16, 64): 2.2}  # whatever else the machine did
    seen = [
        StepTime(batch, context, (0.002 + 2e-5 * batch + 1e-7 * batch * context) * slow.get((batch, context), 1.0))
        for batch in (1, 2, 4, 8, 16, 32)
        for context in (64, 512)
    ]
    costs = StageCosts.measured(decode=seen, max_batch_size=32)
    for context in (16, 256, 1024):
        steps = [costs.decode_seconds(batch, context) for batch in range(1, 33)]
        assert steps == sorted(steps)
        assert steps[-1] < 2 * (0.002 + 2e-5 * 32 + 1e-7 * 32 * context)


def test_noise_never_makes_a_negative_time() -> None:
    falling = PassFormula.fitted([StepTime(1, 10, 1.0), StepTime(1, 100, 0.5), StepTime(4, 100, 0.7)])
    assert min(falling.setup, falling.per_sample, falling.per_token) >= 0
    assert falling.seconds(1, 0) >= 0


def test_bs_max_is_where_steps_stop_being_flat() -> None:
    costs = StageCosts.measured(
        decode=[StepTime(1, 512, 1.0), StepTime(8, 512, 1.1), StepTime(16, 512, 2.0)], max_batch_size=16
    )
    assert costs.saturation_batch == 9
    assert costs.least_pool(33, 1) == 3
    small = StageCosts.measured(
        decode=[StepTime(1, 1, 1.0)], max_batch_size=16, kv_bytes_per_token=10, kv_room_bytes=4000
    )
    assert small.kv_rows(100) == 4
    assert small.least_pool(33, 100) == 9


def test_one_iteration_corrects_a_wrong_profile_and_two_odd_ones_change_nothing() -> None:
    costs = StageCosts.measured(
        decode=[StepTime(1, 1, 1.0), StepTime(4, 1, 4.0)],
        tasks={"a": [StepTime(1, 100, 1.0)], "b": [StepTime(1, 100, 2.0)]},
        max_batch_size=4,
    )
    half_as_long = [ObservedWork("decode", 10, 4, 1, 20.0), ObservedWork("decode", 10, 1, 1, 5.0)]
    passes = [ObservedWork("score", 1 / 2, 4, 100, 6.0), ObservedWork("score", 1 / 2, 4, 100, 3.0)]  # one of each task
    costs = refined(costs, [*half_as_long, *passes])
    assert costs.decode_seconds(4, 1) == pytest.approx(2.0)
    assert costs.score_seconds(4, 100) == pytest.approx(9.0)
    for _ in range(4):
        costs = refined(costs, half_as_long)
    for _ in range(2):
        costs = refined(costs, [ObservedWork("decode", 10, 1, 1, 1e9), ObservedWork("score", 1 / 2, 4, 100, 1e9)])
    assert costs.decode_seconds(4, 1) == pytest.approx(2.0)
    assert len(costs.ratios["score"]) == 3
    for _ in range(5):
        costs = refined(costs, [ObservedWork("decode", 10, 1, 1, 1e9)])
    assert costs.decode_seconds(1, 1) == pytest.approx(10.0), "within limits"


LINK = StageCosts.measured(
    decode=[StepTime(1, context, 0.003 + 1e-6 * context) for context in (64, 512)],
    prefill=[StepTime(1, tokens, 0.004 + 1e-4 * tokens) for tokens in (64, 512)],
    max_batch_size=8,
    kv_bytes_per_token=4000,
    bandwidth=4e8,
)
"""Keys and values of a token take 10 us to send, 100 us to compute."""


def crossover(costs: StageCosts, share: float) -> int:
    """Return the number of tokens from which a sample moves with its KV cache."""
    tokens = np.arange(1.0, 3000.0)
    return int(tokens[costs.takes_cache(np.full_like(tokens, 16.0), tokens, 1, share, "Auto")][0])


class Truth(NamedTuple):
    """True times relative to the profile."""

    fixed: float
    link: float
    pause: float
    rebuild: float

    def moves(self, tokens: float) -> tuple[float, float]:
        """Return (seconds of a move, of its pause)."""
        whole = self.fixed * LINK.move_seconds + self.link * tokens * LINK.link_seconds
        return whole, self.pause * LINK.pause_seconds(tokens)

    def costs(self) -> StageCosts:
        """Return costs learned from noiseless moves of every length."""
        exact = [
            ObservedMove(at == 1, 1, t, self.moves(t)[at]) for at in (0, 1) for t in np.linspace(20, 900, 100).tolist()
        ]
        return dataclasses.replace(LINK, ratios={"rebuild": (self.rebuild,)}, moves=(tuple(exact),))


def watched(truth: Truth, tokens: float, noise: np.random.Generator) -> list[ObservedWork]:
    """Observe one move with a cache, and one by tokens."""

    def seen(kind: Kind, seconds: float) -> ObservedWork:
        return ObservedWork(kind, 1, 1, tokens, seconds * noise.uniform(0.8, 1.25))

    whole, pause = truth.moves(tokens)
    again = truth.rebuild * LINK.prefill_seconds(1, tokens)
    return [seen("transfer", whole), seen("pause", pause), seen("rebuild", again)]


@pytest.mark.parametrize(
    ("share", "truth"),
    [
        (0.5, Truth(4.0, 4.0, 3.0, 1.3)),
        (0.0, Truth(6.0, 6.0, 4.0, 2.0)),
        (0.5, Truth(1.0, 12.0, 3.0, 1.3)),
        (0.5, Truth(4.0, 0.02, 3.0, 1.3)),
    ],
    ids=["all slower", "the pause alone", "a slow link", "a fast link"],
)
def test_after_five_iterations_of_moves_of_either_kind_the_crossover_is_the_true_one(
    share: float, truth: Truth
) -> None:
    learned, noise = LINK, np.random.default_rng(1)
    for _ in range(5):
        learned = refined(
            learned, [work for tokens in noise.integers(20, 900, 12) for work in watched(truth, float(tokens), noise)]
        )
    true = crossover(truth.costs(), share)
    assert true > 50
    assert crossover(LINK, share) < true / 2
    assert crossover(learned, share) == pytest.approx(true, rel=0.15)
    moves_alone = dataclasses.replace(learned, ratios={**learned.ratios, "rebuild": (1.0,)})
    assert crossover(moves_alone, share) > 1.25 * true, "what rebuilding takes must be learned as well"


def test_one_hung_move_and_one_that_took_nothing_change_little() -> None:
    seen = [
        ObservedWork(kind, 1, 1, tokens, LINK.kv_seconds(tokens)) for kind in ("transfer",) for tokens in (50.0, 400.0)
    ]
    odd = [ObservedWork("transfer", 1, 1, 200, 60.0), ObservedWork("transfer", 1, 1, 200, 1e-6)]
    learned = refined(refined(LINK, seen * 4), odd)
    for tokens in (50.0, 400.0):
        assert learned.kv_seconds(tokens) == pytest.approx(LINK.kv_seconds(tokens), rel=0.15)


def test_a_sample_that_is_decoded_on_counts_by_its_pause_and_a_source_that_waits_by_its_share() -> None:
    pause, whole = LINK.pause_seconds(100.0), LINK.kv_seconds(100.0)
    assert whole == pytest.approx(0.003 + 5 * 0.003 + 100 * 1e-5)
    assert pause == pytest.approx(0.003 + 2 * 0.003 + 16 * 1e-5)
    assert LINK.kv_cost(100.0, 0.0) == pytest.approx(pause)
    assert LINK.kv_cost(100.0, 0.25) == pytest.approx(pause + (whole - pause) / 4)
    assert LINK.kv_cost(100.0, 1.0) == pytest.approx(whole)


def test_a_move_is_not_corrected_twice_for_the_steps_that_it_waits_for() -> None:
    slower = refined(LINK, [ObservedWork("decode", 10, 1, 100, 10 * 2 * LINK.decode_seconds(1, 100))])
    assert slower.kv_seconds(100.0) == pytest.approx(LINK.kv_seconds(100.0) + 5 * 0.003)
    assert slower.pause_seconds(100.0) == pytest.approx(LINK.pause_seconds(100.0) + 2 * 0.003)
    moved = ObservedWork("transfer", 1, 1, 100, 3 * LINK.kv_seconds(100.0)), ObservedWork("pause", 1, 1, 1, 0.03)
    assert refined(slower, moved).kv_seconds(100.0) == pytest.approx(3 * LINK.kv_seconds(100.0))
    assert refined(slower, moved).pause_seconds(1.0) == pytest.approx(0.03)


def test_commands_that_take_long_make_rebuilding_dear() -> None:
    far = refined(LINK, [ObservedWork("command", 4, 1, 1, 4 * 0.02)])
    assert far.acknowledged_seconds == pytest.approx(0.02)
    assert far.rebuild_seconds(16.0, 100.0, 1) == pytest.approx(LINK.rebuild_seconds(16.0, 100.0, 1) + 1.5 * 0.015)


def test_decoding_known_tokens_again_goes_by_decoding_until_it_was_seen() -> None:
    replays = dataclasses.replace(LINK, replays=True)
    steps = 200 * replays.decode_seconds(1, 16 + 100)
    rest = replays.rebuild_seconds(16.0, 200.0, 1) - steps
    slower = refined(replays, [ObservedWork("decode", 10, 1, 100, 10 * 2 * replays.decode_seconds(1, 100))])
    twice = slower.rebuild_seconds(16.0, 200.0, 1)
    assert twice == pytest.approx(2 * steps + rest + replays.decode_seconds(1, 216))  # the step that follows, too
    seen = refined(slower, [ObservedWork("rebuild", 50, 1, 60, 50 * 3 * replays.decode_seconds(1, 60))])
    assert seen.scale["rebuild"] == pytest.approx(3.0)
    assert seen.rebuild_seconds(16.0, 200.0, 1) == pytest.approx(twice + steps)


def step_seconds(batch: float, context: float) -> float:
    """Seconds of a machine's steps: flat up to four samples, with little effect of the context."""
    return 0.002 + 6e-5 * max(0.0, batch - 4) + 2e-8 * batch * context


def spans(generator: Random, beside: float) -> list[ObservedWork]:
    """Return noisy spans of an iteration: large batches of short samples, then a tail of few long ones, possibly with
    scoring."""
    answer = []
    for rows, context in [(40, 60), (24, 90), (17, 150), (9, 250), (4.3, 400), (2, 600), (1, 800), (1, 1000)]:
        noise, share = generator.lognormvariate(0, 0.15), float(beside > 1 and rows < 10)
        slower = 1 + share * (beside - 1)
        answer.append(
            ObservedWork("decode", 100, rows, context, 100 * noise * slower * step_seconds(rows, context), share)
        )
    return answer


@pytest.mark.parametrize("beside", [1.0, 1.4])
def test_a_profile_of_a_bad_moment_gives_way_to_the_steps_that_were_made(beside: float) -> None:
    wrong = {1: 1.6, 4: 1.3, 16: 1.0, 48: 0.7}
    profile = [StepTime(b, c, wrong[b] * step_seconds(b, c) + 7e-7 * c) for b in wrong for c in (64, 512)]
    costs, generator = StageCosts.measured(decode=profile, max_batch_size=48), Random(3)
    for number in range(8):
        costs = refined(costs, spans(generator, beside if number % 2 else 1.0))
    for batch, context in [(1, 900), (2, 500), (4, 400), (16, 150), (32, 80)]:
        assert costs.decode_seconds(batch, context) == pytest.approx(step_seconds(batch, context), rel=0.15)
    assert costs.contention_ratio == pytest.approx(beside, rel=0.1)


def test_a_few_slow_steps_correct_a_profile_and_a_few_fast_ones_that_were_held_up_do_not() -> None:
    """Two or three steps of 0.2 s fit into an interval; three of 4 ms in half a second show a delay."""
    for step, took, learned in ((0.2, 0.3, 0.3), (0.004, 0.16, 0.004)):
        costs = StageCosts.measured(decode=[StepTime(1, 1, step), StepTime(4, 1, step)], max_batch_size=4)
        costs = refined(costs, [ObservedWork("decode", 3, rows, 1, 3 * took) for rows in (1, 4)])
        assert costs.decode_seconds(4, 1) == pytest.approx(learned)


def test_steps_that_were_seen_beside_scoring_alone_count_where_company_costs_nothing() -> None:
    """A job that always fuses decodes its tail only beside scoring, and the profile was wrong there."""
    profile = [StepTime(b, c, (0.02 if b < 8 else 0.01) * max(1, b / 8)) for b in (1, 4, 8, 32) for c in (64, 512)]
    costs = StageCosts.measured(decode=profile, max_batch_size=32)
    tail = [ObservedWork("decode", 100, rows, 400, 100 * 0.008, contended=1.0) for rows in (1, 2, 4)]
    costs = refined(
        costs, [ObservedWork("decode", 100, 32, 80, 100 * 0.04), ObservedWork("decode", 100, 8, 80, 1.0), *tail * 3]
    )
    assert costs.contention_ratio == 1
    assert costs.decode_seconds(1, 400) == pytest.approx(0.008, rel=0.1)
    assert costs.decode_seconds(32, 80) == pytest.approx(0.04, rel=0.1)


def test_batches_that_nobody_saw_follow_those_that_were_seen() -> None:
    profile = [StepTime(b, c, 0.01 * b) for b in (1, 8, 32) for c in (64, 512)]
    costs = refined(StageCosts.measured(decode=profile, max_batch_size=32), [ObservedWork("decode", 100, 8, 100, 4.0)])
    assert costs.decode_seconds(8, 100) == pytest.approx(0.04, rel=0.01)
    assert costs.decode_seconds(32, 100) == pytest.approx(0.16, rel=0.01)
    assert costs.scale["decode"] == pytest.approx(0.5)


@settings(deadline=None, max_examples=30)
@given(make.costs(), st.integers(1, 8), st.integers(1, 100))
def test_costs_survive_the_disk(costs: StageCosts, batch: int, context: int) -> None:
    costs = refined(
        costs, [ObservedWork("decode", 9, batch, context, 1.0, 0.7), ObservedWork("score", 1, batch, context, 2.0)]
    )
    again = StageCosts.from_document(json.loads(json.dumps(costs.document())))
    assert again == costs
    assert again.decode_seconds(batch, context) == costs.decode_seconds(batch, context)


def test_a_move_over_an_unknown_bandwidth_takes_forever_for_any_number_of_tokens() -> None:
    costs = StageCosts.measured(decode=[StepTime(1, 1, 1.0)], max_batch_size=1)
    tokens = np.array([0.0, 1.0])
    for share in (0.0, 0.5, 1.0):
        assert np.isposinf(costs.kv_cost(tokens, share)).all()
    assert np.isposinf(costs.kv_seconds(tokens)).all()
    assert costs.kv_seconds(0.0) == costs.kv_cost(0.0, 0.0) == float("inf")


def test_impossible_costs_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="no decode step was measured"):
        StageCosts.measured(decode=[], max_batch_size=1)
    with pytest.raises(ValueError, match="measured time"):
        StageCosts.measured(decode=[StepTime(0, 1, 1.0)], max_batch_size=1)
    with pytest.raises(ValueError, match="max_batch_size is 0"):
        StageCosts.measured(decode=[StepTime(1, 1, 1.0)], max_batch_size=0)
    with pytest.raises(ValueError, match="unknown field speed"):
        StageCosts.from_document({"speed": 1})
    with pytest.raises(ValueError, match="decode"):
        StageCosts.from_document({"max_batch_size": 1})
    good = StageCosts.measured(decode=[StepTime(1, 1, 1.0)], max_batch_size=1).document()
    assert StageCosts.from_document(good).document() == good
    for field, value in (("setup_seconds", 10**400), ("wake_seconds", "1"), ("command_seconds", None)):
        with pytest.raises(ValueError, match=f"{field} is .*must be a finite number"):
            StageCosts.from_document(good | {field: value})
    with pytest.raises(ValueError, match=r"score.setup is nan"):
        StageCosts.from_document(good | {"score": {"setup": float("nan")}})
