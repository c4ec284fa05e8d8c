"""Cross entropy to a teacher's logits in chunks: equal to float64, and without gradient for the teacher."""

import pytest
import torch

from rlhf_workers.losses import log_probabilities
from rlhf_workers.losses.distillation import distillation


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_values_and_gradients_equal_plain_ones(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probabilities, "CHUNK_BYTES", 4 * 37 * 3)  # three rows a chunk
    generator = torch.Generator().manual_seed(1)
    student, teacher = (4 * torch.randn(11, 37, generator=generator) for _ in range(2))
    student.requires_grad_()
    teacher.requires_grad_()
    weights = torch.linspace(-1, 2, 11)
    outcome = distillation(student, teacher, temperature)
    (outcome.cross_entropy * weights).sum().backward()
    plain, divisor = student.detach().double().requires_grad_(), temperature or 1.0
    p = torch.softmax(teacher.detach().double() / divisor, -1)
    expected = -(p * torch.log_softmax(plain / divisor, -1)).sum(-1)
    (expected * weights).sum().backward()
    torch.testing.assert_close(outcome.cross_entropy.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outcome.entropy.double(), -(p * p.log()).sum(-1), atol=1e-5, rtol=1e-5)
    assert student.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(student.grad.double(), plain.grad, atol=1e-5, rtol=1e-5)
    assert teacher.grad is None
    assert torch.equal(outcome.agrees, student.argmax(-1) == teacher.argmax(-1))


def test_a_token_that_the_teacher_never_draws_costs_nothing() -> None:
    teacher = torch.tensor([[0.0, 0.0, -torch.inf]])
    student = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    outcome = distillation(student, teacher, 1.0)
    outcome.cross_entropy.sum().backward()
    assert outcome.cross_entropy.item() == pytest.approx(torch.tensor(2.0).log().item())
    assert student.grad is not None
    assert student.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_logits_over_another_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 5\].*\[2, 6\]"):
        distillation(torch.zeros(2, 5), torch.zeros(2, 6), 1.0)
