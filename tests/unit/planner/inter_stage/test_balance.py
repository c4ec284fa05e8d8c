"""Moves by learned throughput: never a lower rate; unequal workers, drafts, padded steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator import random_iterations as make

from rlhf_planner.inter_stage.balance import balance
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.tail_placement import TailSample
from rlhf_planner.inter_stage.throughput import EVEN_PACE, PRIOR, ThroughputCurve, WorkerPace
from rlhf_planner.speculation.forecast import SpeculationForecast, SpeculationPoint

LENGTHS = LengthModel.prior(200)
DRAFTS = SpeculationForecast((SpeculationPoint(1, 4.0, 1.2, 1.0), SpeculationPoint(4, 1.2, 1.2, 1.0)))


def pace(ratio: float, rows: float = 4.0, times: int = 60) -> WorkerPace:
    seen = EVEN_PACE
    for _ in range(times):
        seen = seen.observed(rows, ratio)
    return seen


def unfinished(first: int, count: int, tokens: int = 0) -> list[TailSample]:
    return [TailSample(first + index, 10, tokens) for index in range(count)]


def finish(samples: list[TailSample], costs: StageCosts, own: WorkerPace, context: float) -> float:
    left = LENGTHS.remaining_each(np.array([s.tokens for s in samples]), np.array([s.prompt_tokens for s in samples]))
    return ThroughputCurve(costs, context, len(samples), own).finish(left)


@settings(deadline=None, max_examples=60)
@given(make.held_samples(), make.costs(), st.lists(st.floats(0.25, 4.0), min_size=5, max_size=5), st.booleans())
def test_balancing_never_lowers_the_predicted_throughput(
    tails: dict[str, list[TailSample]], plain: StageCosts, ratios: list[float], drafts: bool
) -> None:
    costs = replace(plain, decode=replace(plain.decode, slope=tuple(0.0 for _ in plain.decode.slope)))
    costs = replace(costs, speculation=DRAFTS) if drafts else costs
    paces = {name: pace(ratio) for name, ratio in zip(sorted(tails), ratios, strict=False)}
    now = {name: list(samples) for name, samples in tails.items()}
    for together in balance(tails, costs, LENGTHS, paces=paces):
        pair = {move.source for move in together.moves} | {move.destination for move in together.moves}
        before = max(finish(now[name], costs, paces[name], 0.0) for name in pair)
        for move in together.moves:
            (sample,) = [candidate for candidate in now[move.source] if candidate.sample == move.sample]
            now[move.source].remove(sample)
            now[move.destination].append(sample)
        after = max(finish(now[name], costs, paces[name], 0.0) for name in pair)
        assert after + together.gain_seconds <= before * (1 + 1e-9), "as many tokens in less time, its cost included"
        assert together.gain_seconds > 0


LINEAR = StageCosts.measured(decode=[StepTime(1, 1, 1.0), StepTime(16, 1, 8.5)], max_batch_size=16)


def test_a_slow_worker_gives_samples_to_faster_ones_that_hold_as_many() -> None:
    tails = {name: unfinished(8 * at, 8) for at, name in enumerate("abcd")}
    assert balance(tails, LINEAR, LENGTHS) == ()
    paces = {"a": pace(3.0, 8), "b": pace(1.0, 8), "c": pace(0.6, 8), "d": pace(1.0, 8)}
    first = balance(tails, LINEAR, LENGTHS, paces=paces)[0]
    assert (first.moves[0].source, first.moves[0].destination) == ("a", "c")
    assert len(first.moves) > 1
    assert first.gain_seconds > 0
    (idle,) = balance({"a": unfinished(0, 4), "b": []}, LINEAR, LENGTHS)[:1]
    assert idle.after > idle.before > 0


def test_a_curve_is_what_drafts_make_of_it_and_of_its_own_pace() -> None:
    plain, drafted = ThroughputCurve(LINEAR, 0, 20), ThroughputCurve(replace(LINEAR, speculation=DRAFTS), 0, 20)
    assert drafted.tokens_per_second(1) == pytest.approx(plain.tokens_per_second(1) * 4 / 1.2)
    assert drafted.tokens_per_second(16) == pytest.approx(plain.tokens_per_second(16)), "zero is a candidate"
    slow = ThroughputCurve(LINEAR, 0, 20, pace(2.0))
    assert slow.tokens_per_second(4) == pytest.approx(plain.tokens_per_second(4) / 2, rel=0.15)
    assert plain.tokens_per_second(20) == plain.tokens_per_second(16), "no more rows than it decodes at once"
    assert plain.finish([2.0, 3.0]) == pytest.approx(2 / plain.tokens_per_second(2) * 2 + 1)


def test_a_few_odd_steps_move_nobodys_pace_far() -> None:
    assert EVEN_PACE.observed(4, 2.0).level == pytest.approx(2 ** (1 / (PRIOR + 1)))
    assert pace(2.0).level == pytest.approx(2.0, rel=0.15)
    assert EVEN_PACE.observed(0, 2.0) == EVEN_PACE.observed(3, float("inf")) == EVEN_PACE
    both = pace(1.0, rows=1)
    for _ in range(40):
        both = both.observed(16, 3.0)
    single, sixteen = both.factors(np.array([1.0, 16.0]))
    assert single < 1.4 < 2.0 < sixteen, "a curve of its own, not a factor"


def test_where_steps_are_padded_several_samples_move_together() -> None:
    steps = [StepTime(b, 1, 1.0 if b <= 4 else 2.0 if b <= 8 else 3.0) for b in range(1, 13)]
    padded = StageCosts.measured(decode=steps, max_batch_size=12)
    (together,) = balance({"a": unfinished(0, 12), "b": unfinished(12, 0)}, padded, LENGTHS)
    assert len(together.moves) == 4, "to 8 and 4: fewer win nothing, more no more"


def test_samples_that_leave_their_siblings_must_win_what_they_lose_meanwhile() -> None:
    costs = replace(LINEAR, speculation=SpeculationForecast((SpeculationPoint(1, 2.0, 1.0, 1.0),)))
    tails = {"a": unfinished(0, 4), "b": []}
    gain = balance(tails, costs, LENGTHS)[0].gain_seconds
    assert balance(tails, costs, LENGTHS, lacking=lambda worker, _: float(worker == "b"))[0].gain_seconds < gain
    assert balance(tails, costs, LENGTHS, lacking=lambda *_: 1e6) == ()
    assert balance(tails, LINEAR, LENGTHS, lacking=lambda *_: 1e6), "without drafts nothing is lost"
