"""KL estimators are unbiased over the whole vocabulary; the controller moves the right way and no further."""

import math
from collections.abc import Callable

import pytest
import torch

from rlhf_api.algorithms.fields import KLEstimator
from rlhf_workers.losses.kl import adapted_coefficient, divergence, k1, k3, sequence_kl, token_kl


def test_both_estimators_have_the_exact_divergence_as_their_mean() -> None:
    """No token's k3 is at its limit, as for policies that are near each other."""
    generator = torch.Generator().manual_seed(0)
    policy = torch.log_softmax(0.5 * torch.randn(1, 50, generator=generator).double(), dim=-1)
    reference = torch.log_softmax(0.5 * torch.randn(1, 50, generator=generator).double(), dim=-1)
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in (k1, k3):
        assert float((policy.exp() * estimator(policy, reference)).sum()) == pytest.approx(float(exact))
    assert (k3(policy, reference) >= 0).all()
    assert (k1(policy, reference) < 0).any()


def mean_of(estimator: KLEstimator, logits: torch.Tensor, sampler: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the mean of an estimator over tokens drawn from `sampler`, differentiable in the policy's `logits`."""
    policy = torch.log_softmax(logits, dim=-1)
    return (sampler.exp() * divergence(estimator, policy, other, sampler)).sum()


def test_slopes_of_the_estimators_are_those_of_the_divergences_that_they_stand_for() -> None:
    """Over the whole vocabulary: K1's mean slope is zero, and K2 and K3 have exact slopes at the policy that sampled.

    Unbiased has the value and the slope of KL(policy || reference) also at any other policy.
    """
    generator = torch.Generator().manual_seed(1)
    initial, moved, other = (0.3 * torch.randn(20, generator=generator).double() for _ in range(3))
    reference = torch.log_softmax(other, dim=-1)

    def forward_kl(logits: torch.Tensor) -> torch.Tensor:
        policy = torch.log_softmax(logits, dim=-1)
        return (policy.exp() * (policy - reference)).sum()

    def reverse_kl(logits: torch.Tensor) -> torch.Tensor:
        return (reference.exp() * (reference - torch.log_softmax(logits, dim=-1))).sum()

    def numeric(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
        step = 1e-6 * torch.eye(20, dtype=torch.float64)
        return torch.stack([(function(at + row) - function(at - row)) / 2e-6 for row in step])

    def slope(estimator: KLEstimator, at: torch.Tensor, sampled_at: torch.Tensor) -> torch.Tensor:
        logits = at.clone().requires_grad_()
        sampler = torch.log_softmax(sampled_at, dim=-1)
        (found,) = torch.autograd.grad(mean_of(estimator, logits, sampler, reference), logits)
        return found

    assert slope("K1", initial, initial).abs().max() < 1e-12
    torch.testing.assert_close(slope("K2", initial, initial), numeric(forward_kl, initial), atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(slope("K3", initial, initial), numeric(reverse_kl, initial), atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(slope("Unbiased", initial, initial), numeric(forward_kl, initial), atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(slope("Unbiased", moved, initial), numeric(forward_kl, moved), atol=1e-8, rtol=1e-6)
    value = mean_of("Unbiased", moved, torch.log_softmax(initial, dim=-1), reference)
    assert float(value) == pytest.approx(float(forward_kl(moved)))


@pytest.mark.parametrize("x", [-100.0, -20.5, -1.0, 0.0, 1.0, 20.5, 100.0])
@pytest.mark.parametrize("old", [-100.0, 0.0, 100.0])
def test_no_divergence_is_infinite_and_slopes_are_those_of_the_written_formula(x: float, old: float) -> None:
    """Compared with finite differences of the formulas in plain Python; the reference is at 0."""

    def within(value: float) -> float:
        return min(max(value, -20.0), 20.0)

    def k3_of(at: float) -> float:
        return min(math.expm1(within(-at)) - within(-at), 10.0)

    formulas: dict[KLEstimator, Callable[[float], float]] = {
        "K1": lambda at: at,
        "K2": lambda at: within(at) ** 2 / 2,
        "K3": k3_of,
        "Unbiased": lambda at: math.exp(within(at - old)) * k3_of(at),
    }
    for estimator, formula in formulas.items():
        inputs = torch.tensor([x], dtype=torch.float64, requires_grad=True)
        zero = torch.zeros(1, dtype=torch.float64)
        value = divergence(estimator, inputs, zero, zero + old)
        (slope,) = torch.autograd.grad(value.sum(), inputs)
        assert value.item() == pytest.approx(formula(x), rel=1e-9)
        numeric = (formula(x + 1e-5) - formula(x - 1e-5)) / 2e-5
        assert slope.item() == pytest.approx(numeric, rel=1e-4, abs=1e-6 + 1e-10 * math.exp(within(x - old)))


def test_sequence_kl_sums_over_tokens_and_averages_over_responses() -> None:
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    log_p = torch.tensor([[1.0, 2.0], [4.0, 99.0], [99.0, 99.0]])
    assert sequence_kl(log_p, torch.zeros(3, 2), mask) == pytest.approx((3 + 4) / 2)


def test_token_kl_averages_over_all_tokens() -> None:
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    log_p = torch.tensor([[1.0, 2.0], [4.0, 99.0], [99.0, 99.0]])
    assert token_kl(log_p, torch.zeros(3, 2), mask) == pytest.approx((3 + 4) / 3)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),
        (6.6, 0.1 * 1.001),
        (600.0, 0.1 * 1.002),
        (0.0, 0.1 * 0.998),
        (-5.0, 0.1 * 0.998),
        (float("nan"), 0.1),
    ],
)
def test_the_coefficient_moves_in_proportion_and_at_most_by_the_limit(kl: float, expected: float) -> None:
    assert adapted_coefficient(0.1, kl, target=6.0, samples=100, horizon=10_000) == pytest.approx(expected)
