"""KL estimators are unbiased over the whole vocabulary; the controller moves the right way and no further."""

import pytest
import torch

from rlhf_workers.losses.kl import adapted_coefficient, k1, k3, sequence_kl, token_kl


def test_both_estimators_have_the_exact_divergence_as_their_mean() -> None:
    """Where no token's k3 is at its limit, as between policies that are near each other."""
    generator = torch.Generator().manual_seed(0)
    policy = torch.log_softmax(0.5 * torch.randn(1, 50, generator=generator).double(), dim=-1)
    reference = torch.log_softmax(0.5 * torch.randn(1, 50, generator=generator).double(), dim=-1)
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in (k1, k3):
        assert float((policy.exp() * estimator(policy, reference)).sum()) == pytest.approx(float(exact))
    assert (k3(policy, reference) >= 0).all()
    assert (k1(policy, reference) < 0).any()


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
