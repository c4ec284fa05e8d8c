"""Replay of prefix scoring: by hand, against single steps, and invariants."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_api.score_blocks import BLOCK
from rlhf_planner.inter_stage.fitted_costs import PassFormula
from rlhf_planner.inter_stage.incremental_gain import PassSums, TokenCosts, Trace, incremental_gain, score_trace

A_TOKEN = 0.01


def trace(samples: list[tuple[float, float, int, int]], workers: int = 1) -> Trace:
    begun, finished, prompts, responses = (np.array(column) for column in zip(*samples, strict=True))
    return Trace(begun, finished, prompts, responses, dict.fromkeys(range(workers), 0.0))


COSTS = TokenCosts(PassFormula(per_token=A_TOKEN))


def test_one_long_sample_needs_only_its_last_block() -> None:
    recorded = trace([(0.0, 1000.0, 10, 500)])
    gain = incremental_gain(recorded, COSTS)
    assert gain.without == pytest.approx(1000 + 510 * A_TOKEN)
    whole = (510 - 1) // BLOCK * BLOCK
    assert gain.with_prefixes == pytest.approx(1000 + (510 - whole) * A_TOKEN)
    assert gain.early_share == whole / 510
    assert not gain.worthwhile, "five seconds of a thousand are under the margin"


def test_a_reward_model_sees_the_whole_sample_at_the_end() -> None:
    costs = TokenCosts(PassFormula(per_token=A_TOKEN), late=PassFormula(setup=1.0, per_token=A_TOKEN))
    gain = incremental_gain(trace([(0.0, 100.0, 10, 125)]), costs)
    assert gain.with_prefixes == pytest.approx(100 + 7 * A_TOKEN + 1.0 + 135 * A_TOKEN)


def test_a_worker_that_is_never_idle_gains_nothing() -> None:
    busy = trace([(0.0, 0.001, 1, 60), *[(0.0, 0.5, 0, 500)] * 20])
    gain = incremental_gain(busy, COSTS)
    assert (gain.with_prefixes, gain.early_share) == (gain.without, 0.0)


def test_a_setup_and_a_token_are_told_apart() -> None:
    line = PassSums()
    for tokens in (100, 300, 700):
        line.add(tokens, 0.5 + 0.001 * tokens)
    assert line.fitted().setup == pytest.approx(0.5)
    assert line.fitted().per_token == pytest.approx(0.001)
    level = PassSums()
    level.add(100, 1.0)
    level.add(100, 1.0)
    assert level.fitted() == PassFormula(per_token=0.01), "one size tells nothing of a setup"


def test_a_setup_is_never_below_nothing_by_a_rounding() -> None:
    for count in range(1, 200):
        alike = PassSums()
        for _ in range(3):
            alike.add(count, 0.1 * count)
        assert alike.fitted().setup >= 0
    assert PassSums().fitted() == PassFormula()


def step_by_step(recorded: Trace, costs: TokenCosts, tick: float) -> float:
    """Apply the same rules in small time steps, for one worker."""
    moment, free_at, end = 0.0, 0.0, 0.0
    size = len(recorded.begun)
    done, scored = [0] * size, [False] * size
    while not all(scored):
        if moment >= free_at:
            waiting = [i for i in np.argsort(recorded.finished, kind="stable") if not scored[i]]
            first = waiting[0]
            if recorded.finished[first] <= moment:
                whole = int(recorded.prompts[first] + recorded.responses[first])
                free_at = end = moment + costs.seconds(whole - done[first], whole)
                scored[first] = True
            else:
                blocks = [_blocks(recorded, i, moment) - done[i] for i in range(size)]
                best = int(np.argmax(blocks))
                if blocks[best] >= BLOCK:
                    done[best] += blocks[best]
                    free_at = moment + costs.prefix_seconds(blocks[best])
        moment += tick
    return end


def _blocks(recorded: Trace, i: int, moment: float) -> int:
    if not recorded.begun[i] <= moment < recorded.finished[i]:
        return 0
    share = (moment - recorded.begun[i]) / (recorded.finished[i] - recorded.begun[i])
    known_tokens = int(recorded.prompts[i]) + int(share * recorded.responses[i] + 1e-6)
    return max(0, known_tokens - 1) // BLOCK * BLOCK


samples = st.lists(
    st.tuples(st.sampled_from((0.0, 1.0)), st.floats(1.5, 20.0), st.integers(1, 90), st.integers(1, 400)),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=10)
@given(samples, st.floats(0.0, 0.1))
def test_replays_are_those_of_single_steps(given_samples: list[tuple[float, float, int, int]], setup: float) -> None:
    costs, tick = TokenCosts(PassFormula(setup=setup, per_token=0.002)), 0.004
    recorded = trace(given_samples)
    passes = score_trace(recorded, costs, prefixes=True).passes
    # Every pass begins up to a tick late, and a sample that ends meanwhile may take another's turn.
    assert step_by_step(recorded, costs, tick) == pytest.approx(
        score_trace(recorded, costs, prefixes=True).end, abs=tick * (len(passes) + 1) + setup + BLOCK * 0.002 * 2
    )


@settings(deadline=None, max_examples=50)
@given(samples, st.integers(1, 3), st.floats(0.0, 0.5))
def test_every_sample_is_scored_once_after_it_ended(
    given_samples: list[tuple[float, float, int, int]], workers: int, setup: float
) -> None:
    costs, recorded = TokenCosts(PassFormula(setup=setup, per_token=0.002)), trace(given_samples, workers)
    longest = costs.prefix_seconds(500)
    for prefixes in (False, True):
        gain = score_trace(recorded, costs, prefixes=prefixes)
        assert sum(count for *_, count in gain.passes) == len(given_samples)
        assert gain.end >= recorded.finished.max()
        assert not gain.early_tokens or prefixes
        for worker in range(workers):
            spans = sorted((start, end) for who, start, end, _ in gain.passes if who == worker)
            assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(spans))
    late = score_trace(recorded, costs, prefixes=True).end - score_trace(recorded, costs, prefixes=False).end
    assert late <= longest * len(given_samples), "at most one prefix is in the way of each"


def test_of_very_many_samples_and_workers_a_part_is_replayed_with_the_last_to_finish() -> None:
    rng = np.random.default_rng(3)
    lengths = np.minimum(900, rng.lognormal(4.5, 1.0, 5000)).astype(int) + 1
    many = trace([(0.0, 0.01 * n, 20, n) for n in lengths.tolist()], workers=40)
    gain = incremental_gain(many, TokenCosts(PassFormula(per_token=1e-4), most=16))
    last = many.finished.max()
    assert last + 0.0001 <= gain.with_prefixes <= last + 64 * 1e-4 * 2
    assert gain.without >= last + lengths.max() * 1e-4
