"""Token weights by the mismatch between trainer and engine: each mode against its formula in floats."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_api.algorithms.mismatch import LIMITS, MismatchCorrection
from rlhf_workers.losses.mismatch import correction, mismatch_metrics

RESPONSES = [[0.1, -0.2, 0.3], [1.0], [0.0005, -0.001], [-0.8, -0.9], [100.0], [-100.0, 100.0], [math.inf, 0.0]]
"""o - g of every token."""


def within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def expected(response: list[float], mode: str, low: float, high: float) -> list[float]:
    limited = [within(difference, -20, 20) for difference in response]
    ratios = [math.exp(difference) for difference in limited]
    if mode == "Truncate":
        return [within(ratio, low, high) for ratio in ratios]
    if mode == "Mask":
        return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]
    if mode == "GeometricMask":
        mean = math.exp(sum(limited) / len(limited))
        return [float(low <= mean <= high)] * len(limited)
    product = math.exp(within(sum(limited), -20, 20))
    return [product if low <= product <= high else 0.0] * len(limited)


def found(responses: list[list[float]], fields: MismatchCorrection) -> tuple[list[float], list[bool]]:
    old = torch.tensor([difference for response in responses for difference in response], requires_grad=True)
    samples = torch.tensor([place for place, response in enumerate(responses) for _ in response], dtype=torch.int64)
    result = correction(old, torch.zeros_like(old), samples, len(responses), fields)
    assert not result.weights.requires_grad
    return result.weights.tolist(), result.outside.tolist()


@pytest.mark.parametrize("mode", LIMITS)
def test_every_mode_is_its_formula_by_the_limits_of_its_source(mode: str) -> None:
    limits = {"Truncate": (0, 2), "Mask": (0.5, 5), "GeometricMask": (0.999, 1.002), "SequenceMask": (0, 3)}[mode]
    weights, _ = found(RESPONSES, MismatchCorrection.model_validate({"mode": mode}))
    wanted = [weight for response in RESPONSES for weight in expected(response, mode, *limits)]
    assert weights == pytest.approx(wanted, rel=1e-5, abs=1e-8)


@given(
    st.lists(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from(sorted(LIMITS)),
    st.floats(0, 0.9),
    st.floats(1.1, 4),
)
def test_limits_of_a_manifest_hold(responses: list[list[float]], mode: str, low: float, high: float) -> None:
    weights, outside = found(responses, MismatchCorrection.model_validate({"mode": mode, "low": low, "high": high}))
    wanted = [weight for response in responses for weight in expected(response, mode, low, high)]
    edges = (abs(weight - limit) < 1e-4 for weight in wanted for limit in (low, high))
    if mode != "GeometricMask" and not any(edges):
        assert weights == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    for weight, corrected in zip(weights, outside, strict=True):
        assert not corrected or weight == 0 or mode == "Truncate"


def test_disabled_counts_every_token_alike_and_no_token_is_no_error() -> None:
    assert found(RESPONSES, MismatchCorrection())[0] == [1.0] * sum(map(len, RESPONSES))
    for mode in ("Disabled", *LIMITS):
        assert found([], MismatchCorrection.model_validate({"mode": mode})) == ([], [])
    nothing = torch.zeros(0)
    assert mismatch_metrics(nothing, nothing, nothing.long(), 3, MismatchCorrection()) == {}


def test_metrics_say_how_far_they_are_apart_and_how_much_was_corrected() -> None:
    old, sampled = torch.tensor([-1.0, -1.0, -2.0, -2.0]), torch.tensor([-1.0, -2.0, -2.0, -1.5])
    fields = MismatchCorrection(mode="Truncate")
    metrics = mismatch_metrics(old, sampled, torch.tensor([0, 0, 1, 1]), 2, fields)
    assert metrics["mismatch"] == pytest.approx(1.5 / 4)
    assert metrics["mismatch_max"] == 1.0
    kl = [math.exp(difference) - 1 - difference for difference in (0.0, 1.0, 0.0, -0.5)]
    assert metrics["mismatch_kl"] == pytest.approx(sum(kl) / 4, rel=1e-5)
    assert metrics["mismatch_corrected"] == 0.25
    assert metrics["mismatch_weight"] == pytest.approx((1 + 2 + 1 + math.exp(-0.5)) / 4)


def test_tokens_that_other_weights_drew_are_corrected_and_say_nothing_of_the_engine() -> None:
    old, sampled = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-4.0, -1.5, -2.0])
    fields, samples = MismatchCorrection(mode="Truncate"), torch.tensor([0, 0, 1])
    stale = torch.tensor([True, False, False])
    metrics = mismatch_metrics(old, sampled, samples, 2, fields, stale)
    fresh = mismatch_metrics(old[1:], sampled[1:], samples[1:], 2, fields)
    assert {name: metrics[name] for name in ("mismatch", "mismatch_max", "mismatch_kl")} == {
        name: fresh[name] for name in ("mismatch", "mismatch_max", "mismatch_kl")
    }
    assert metrics["mismatch_corrected"] == pytest.approx(1 / 3), "its weight is cut off, which counts"
    assert mismatch_metrics(old, sampled, samples, 2, fields, torch.ones(3, dtype=torch.bool)) == {}
