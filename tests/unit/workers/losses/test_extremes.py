"""Losses at extreme log-ratios: values and slopes stay finite and correct; ordinary ones are bitwise unchanged."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_api.algorithms.mismatch import MismatchCorrection
from rlhf_workers.algorithms.objectives import PolicyObjective
from rlhf_workers.losses.kl import k3, measured_k3
from rlhf_workers.losses.log_probabilities import selected_log_probabilities
from rlhf_workers.losses.mismatch import mismatch_metrics
from rlhf_workers.losses.ppo import policy_loss, value_loss

EXTREMES = [0.0, 19.0, -19.0, 20.5, -20.5, 89.0, -89.0, 1e4, -1e4, math.inf, -math.inf]


def limited(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


def surrogate(difference: float, advantage: float, dual_clip: float | None) -> float:
    """Eq. 7 with clip 0.2 and the log-ratio within 20, in float64."""
    ratio = math.exp(limited(difference, 20.0))
    loss = max(-ratio * advantage, -limited(ratio - 1.0, 0.2) * advantage - advantage)
    return min(loss, -dual_clip * advantage) if dual_clip is not None and advantage < 0 else loss


@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("difference", EXTREMES)
def test_policy_loss_and_its_slope(difference: float, advantage: float, dual_clip: float | None) -> None:
    inputs = torch.tensor([difference], requires_grad=True)
    got = policy_loss(inputs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2, dual_clip)
    (slope,) = torch.autograd.grad(got.loss.sum(), inputs)
    assert got.loss.item() == pytest.approx(surrogate(difference, advantage, dual_clip), rel=1e-5, abs=1e-7)
    step = 1e-4
    beside = [surrogate(difference + side, advantage, dual_clip) for side in (step, -step)]
    numeric = 0.0 if math.isinf(difference) else (beside[0] - beside[1]) / (2 * step)
    # Exactly at ratio 1 nothing is clipped, but both branches are equal; either has the slope of the plain one.
    assert slope.item() == pytest.approx(numeric, rel=1e-3, abs=1e-4)


def test_a_token_beyond_the_limit_leaves_the_slopes_of_the_others() -> None:
    inputs = torch.tensor([30.0, 0.05, 100.0], requires_grad=True)
    loss = policy_loss(inputs, torch.zeros(3), torch.tensor([-1.0, -1.0, 0.0]), 0.2, 0.2).loss.sum()
    (slope,) = torch.autograd.grad(loss, inputs)
    assert slope.tolist() == pytest.approx([0.0, math.exp(0.05), 0.0])


def test_dual_clip_bounds_what_a_negative_advantage_can_do() -> None:
    inputs = torch.tensor([math.log(2.0), math.log(4.0), math.log(4.0)], requires_grad=True)
    got = policy_loss(inputs, torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]), 0.2, 0.2, dual_clip=3.0)
    (slope,) = torch.autograd.grad(got.loss.sum(), inputs)
    assert got.loss.tolist() == pytest.approx([2.0, 3.0, -1.2])
    assert slope.tolist() == pytest.approx([2.0, 0.0, 0.0])
    assert got.clipped.tolist() == [False, True, True]


@pytest.mark.parametrize("difference", [0.0, 1e-6, 3.0, 4.0, -20.0, 20.5, 89.0, 700.0])
def test_the_measured_divergence_has_no_bound(difference: float) -> None:
    """`difference` is r - x; metrics show the mean of exp(r - x) - 1 - (r - x) as it is, in float64."""
    got = measured_k3(torch.zeros(1), torch.tensor([difference]))
    exact = float(torch.tensor([difference]))
    assert got.item() == pytest.approx(math.expm1(exact) - exact, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("difference", [3.0, 60.0])
def test_metrics_of_a_policy_show_how_far_it_moved_without_a_bound(difference: float) -> None:
    objective = PolicyObjective("actor", lambda *_: None, 1.0, torch.device("cpu"))  # type: ignore[arg-type]
    objective.first_pass = True
    moved = SimpleNamespace(old=torch.zeros(2), stale=None)
    for sign in (1.0, -1.0):
        objective._observe({}, torch.tensor([sign * difference, 0.0]), moved, torch.zeros(2))  # type: ignore[arg-type]
    metrics = objective.metrics()
    exact = (math.expm1(difference) - difference + math.expm1(-difference) + difference) / 4
    assert metrics["actor/approximate_kl"] == pytest.approx(exact)
    assert metrics["actor/mismatch_kl"] == pytest.approx(exact)
    assert metrics["actor/ratio_max"] == pytest.approx(math.exp(difference))
    of_batch = mismatch_metrics(
        torch.tensor([difference, 0.0]), torch.tensor([0.0, 0.0]), torch.tensor([0, 1]), 2, MismatchCorrection()
    )
    assert of_batch["mismatch_kl"] == pytest.approx((math.expm1(difference) - difference) / 2)


@pytest.mark.parametrize("difference", EXTREMES)
def test_k3_and_its_slope(difference: float) -> None:
    """`difference` is r - x; 10 is the limit of a token."""

    def plain(of: float) -> float:
        within = limited(of, 20.0)
        return min(math.expm1(within) - within, 10.0)

    policy = torch.zeros(1, requires_grad=True)
    value = k3(policy, torch.tensor([difference]))
    (slope,) = torch.autograd.grad(value.sum(), policy)
    assert value.item() == pytest.approx(plain(difference), rel=1e-5)
    step = 1e-4
    numeric = 0.0 if math.isinf(difference) else (plain(difference - step) - plain(difference + step)) / (2 * step)
    assert slope.item() == pytest.approx(numeric, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("infinite", [1, 3])
def test_entropy_of_a_token_that_cannot_be_drawn_counts_nothing(infinite: int) -> None:
    """A logit of -inf, as from a vocabulary mask: 0 log 0 = 0, in the value and in the slope."""
    finite = torch.tensor([[0.3, -1.2, 2.0]], requires_grad=True)
    masked = torch.cat([finite, torch.full((1, infinite), -math.inf)], dim=1)
    results = []
    for logits in (finite, masked):
        chosen, entropy = selected_log_probabilities(logits, torch.tensor([1]), 0.7)
        (slope,) = torch.autograd.grad((chosen + 2 * entropy).sum(), finite)
        results.append((chosen.item(), entropy.item(), *slope[0].tolist()))
    assert results[1] == pytest.approx(results[0], abs=1e-6)
    assert all(math.isfinite(value) for value in results[1])


def test_a_choice_that_cannot_be_drawn_has_no_slope_through_a_limited_ratio() -> None:
    logits = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    chosen, _ = selected_log_probabilities(logits, torch.tensor([1]), 1.0)
    loss = policy_loss(chosen, torch.tensor([-1.0]), torch.tensor([2.0]), 0.2, 0.2).loss + k3(chosen, torch.zeros(1))
    loss.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(loss).all()
    assert logits.grad.tolist() == [[0.0, 0.0]]


def test_rounding_is_not_counted_as_clipping_of_a_value() -> None:
    """old + (value - old) is often another float than value; none of these is out of range."""
    generator = torch.Generator().manual_seed(0)
    old = 0.1 * torch.randn(4096, generator=generator)
    values = 1e-3 * torch.randn(4096, generator=generator)
    old = torch.where((values - old).abs() < 0.2, old, 0.0)
    returns = torch.randn(4096, generator=generator)
    assert not value_loss(values, old, returns, 0.2).clipped.any()
    beyond = value_loss(old + 0.3, old, old - 1.0, 0.2)
    assert not beyond.clipped.any()  # the plain branch is the larger one
    assert value_loss(old + 0.3, old, old + 1.0, 0.2).clipped.all()


def test_ordinary_values_keep_their_bits() -> None:
    """Compared with the formulas without limits: deterministic jobs must train the same weights as before."""
    generator = torch.Generator().manual_seed(0)
    log_p = -6 * torch.rand(10_000, generator=generator)
    old = log_p + 2 * (2 * torch.rand(10_000, generator=generator) - 1)
    reference = log_p + 2.5 * (2 * torch.rand(10_000, generator=generator) - 1)
    advantages = torch.randn(10_000, generator=generator)
    results = []
    for bounded in (True, False):
        inputs = log_p.clone().requires_grad_()
        if bounded:
            loss = policy_loss(inputs, old, advantages, 0.2, 0.3).loss + 0.1 * k3(inputs, reference)
        else:
            ratio, difference = torch.exp(inputs - old), reference - inputs
            clipped = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.3) * advantages)
            loss = clipped + 0.1 * (torch.expm1(difference) - difference)
        loss.sum().backward()
        assert inputs.grad is not None
        results.append((loss.detach().numpy().view(np.int32), inputs.grad.numpy().view(np.int32)))
    for ours, plain in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, plain)
