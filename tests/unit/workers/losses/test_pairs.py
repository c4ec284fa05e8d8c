"""Losses of pairs against closed forms, including extremes, and their slopes against finite differences."""

import math

import pytest
import torch

from rlhf_workers.losses.pairs import dpo_loss, ipo_loss, ranking_loss

DIFFERENCES = (-1000.0, -3.0, -0.1, 0.0, 0.7, 4.0, 1000.0)
STEP = 1e-5


def surprise(value: float) -> float:
    """Return -log of the logistic function, without overflow."""
    return math.log1p(math.exp(-value)) if value > 0 else -value + math.log1p(math.exp(value))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.49])
def test_dpo_is_its_formula_at_every_size_of_the_difference(smoothing: float) -> None:
    ours = dpo_loss(torch.tensor(DIFFERENCES, dtype=torch.float64), 0.3, smoothing)
    theirs = [(1 - smoothing) * surprise(0.3 * d) + smoothing * surprise(-0.3 * d) for d in DIFFERENCES]
    assert ours.tolist() == pytest.approx(theirs, rel=1e-12)


def test_ipo_is_least_where_the_difference_is_half_of_one_over_beta() -> None:
    ours = ipo_loss(torch.tensor([2.5, 0.0, -1.0]), 0.2)
    assert ours.tolist() == pytest.approx([0.0, 6.25, 12.25])


def test_ranking_has_a_margin_and_is_centered_by_the_square_of_the_sum() -> None:
    chosen, rejected = torch.tensor([2.0, -1.0, 500.0]), torch.tensor([0.5, 3.0, -500.0])
    ours = ranking_loss(chosen, rejected, 1.0, 0.01)
    theirs = [
        surprise(c - r - 1.0) + 0.01 * (c + r) ** 2 for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)
    ]
    assert ours.tolist() == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("loss", ["dpo", "smoothed", "ipo", "ranking"])
def test_slopes_are_finite_differences(loss: str) -> None:
    def loss_of(values: torch.Tensor) -> torch.Tensor:
        return {
            "dpo": lambda: dpo_loss(values, 0.5),
            "smoothed": lambda: dpo_loss(values, 0.5, 0.2),
            "ipo": lambda: ipo_loss(values, 0.5),
            "ranking": lambda: ranking_loss(values, -0.3 * values, 0.2, 0.1),
        }[loss]()

    at = torch.tensor([-4.0, -0.5, 0.0, 0.3, 6.0], dtype=torch.float64, requires_grad=True)
    loss_of(at).sum().backward()
    assert at.grad is not None
    with torch.no_grad():
        slopes = (loss_of(at + STEP) - loss_of(at - STEP)) / (2 * STEP)
    assert at.grad.tolist() == pytest.approx(slopes.tolist(), abs=1e-8)


def test_no_size_of_the_difference_gives_a_slope_that_is_not_finite() -> None:
    at = torch.tensor(DIFFERENCES, requires_grad=True)
    dpo_loss(at, 1.0, 0.1).sum().backward()
    assert at.grad is not None
    assert bool(torch.isfinite(at.grad).all())
