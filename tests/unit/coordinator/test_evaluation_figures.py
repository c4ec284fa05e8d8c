"""Evaluation figures equal those from counting every choice of responses, and leave out the right samples."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_api.algorithms import full_graph
from rlhf_common.samples import FIRST_AHEAD_SAMPLE, VersionSpan
from rlhf_coordinator.evaluation.figures import evaluation_metrics, pass_at
from rlhf_coordinator.state.evaluation_state import (
    FIRST_SAMPLE,
    EvaluationResult,
    best,
    evaluation_tasks,
    latest_metrics,
)
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse

TASKS = evaluation_tasks(full_graph("grpo"))
FIELD = "reward"


def judged(rewards: list[float | str | None], per_prompt: int) -> dict[str, float]:
    """Return the figures of responses with these rewards; None means abstained, a text means that decoding failed."""
    ledger = Ledger(7, len(rewards), TASKS, 1)
    for index, reward in enumerate(rewards):
        if isinstance(reward, str):
            ledger.give_up(index)
            continue
        tokens = np.arange(index + 1, dtype="<i4").tobytes()
        response = PackedResponse(tokens, tokens, (VersionSpan(7, index + 1),))
        ledger.finish(index, ledger.assign(index, "g"), "g", response, "length" if index == 0 else "stop", "")
        value = None if reward is None else np.float32(reward).tobytes()
        ledger.score(index, ledger.assign_scores(index, [TASKS[0].name], "i"), "i", TASKS[0].name, value)
    assert ledger.all_scored
    return evaluation_metrics(ledger, per_prompt, 1.0, FIELD)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_pass(case: tuple[int, int, int]) -> None:
    count, passed, k = case
    chosen = list(combinations(range(count), k))
    assert pass_at(count, passed, k) == pytest.approx(
        sum(any(index < passed for index in choice) for choice in chosen) / len(chosen)
    )


def test_one_greedy_response_a_prompt() -> None:
    metrics = judged([1.0, 0.0, 0.5, 2.0], 1)
    assert metrics["reward"] == pytest.approx(0.875)
    assert metrics["pass_at_1"] == pytest.approx(0.5)
    assert (metrics["version"], metrics["samples"], metrics["truncated_share"]) == (7.0, 4.0, 0.25)
    assert metrics["response_tokens_mean"] == pytest.approx(2.5)
    assert not {"reward_best", "pass_at_2"} & metrics.keys()


def test_several_responses_a_prompt() -> None:
    metrics = judged([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 3)
    assert metrics["pass_at_1"] == pytest.approx(1 / 6)
    assert metrics["pass_at_2"] == pytest.approx((2 / 3 + 0) / 2)
    assert metrics["pass_at_3"] == pytest.approx(0.5)
    assert metrics["reward_best"] == pytest.approx(0.5)


def test_what_nobody_judged_is_counted_and_in_no_mean() -> None:
    metrics = judged([1.0, None, "lost", 1.0], 2)
    assert (metrics["abstained"], metrics["failed"], metrics["reward"]) == (1.0, 1.0, 1.0)
    assert metrics["pass_at_1"] == 1.0
    assert "pass_at_2" not in metrics, "no prompt has two responses with a reward"
    assert "reward" not in judged([None, "lost"], 1), "a mean of nothing is no zero"


def test_the_best_is_the_highest_and_of_equal_ones_the_earliest() -> None:
    results = [EvaluationResult(version, {"reward": reward}) for version, reward in ((0, 0.1), (5, 0.7), (10, 0.7))]
    top = best([*results, EvaluationResult(15, {})])
    assert top is not None
    assert top.version == 5
    assert latest_metrics(results)["evaluation/best_version"] == 5.0
    assert best([]) is None
    assert latest_metrics([]) == {}


def test_no_sample_of_a_batch_has_the_number_of_one_of_an_evaluation_or_of_a_draft_ahead() -> None:
    largest_batch, largest_evaluation = 2**20, 65536 * 256
    assert largest_batch <= FIRST_SAMPLE
    assert FIRST_SAMPLE + largest_evaluation <= FIRST_AHEAD_SAMPLE
    assert FIRST_AHEAD_SAMPLE + largest_batch < 2**31
