"""Chunked log-probabilities and entropies: equal to log_softmax in float64, with gradients checked numerically."""

import pytest
import torch

from rlhf_workers.losses import log_probabilities
from rlhf_workers.losses.log_probabilities import selected_log_probabilities


def sample(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(rows, vocabulary, generator=generator)).to(dtype).requires_grad_()
    return logits, torch.randint(vocabulary, (rows,), generator=generator)


def plain(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits.double() / temperature, dim=-1)
    return log_p.gather(1, tokens[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_values_and_gradients_equal_plain_ones(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probabilities, "CHUNK_BYTES", 4 * 37 * 3)  # three rows a chunk
    logits, tokens = sample(11, 37)
    weights = torch.linspace(-1, 2, 11)
    results = []
    for function in (selected_log_probabilities, plain):
        chosen, entropy = function(logits, tokens, temperature)
        (slope,) = torch.autograd.grad((weights * (chosen + 0.3 * entropy * chosen)).sum(), logits)
        results.append((chosen.double(), entropy.double(), slope.double()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)  # float32 with logits up to 20 against float64


def test_gradients_against_finite_differences() -> None:
    logits, tokens = sample(3, 5)
    chosen, entropy = selected_log_probabilities(logits, tokens, 1.3)
    (slope,) = torch.autograd.grad(chosen.sum() + 2 * entropy.sum(), logits)
    base, step = logits.detach().double(), 1e-6
    for row in range(3):
        for column in range(5):
            up, down = base.clone(), base.clone()
            up[row, column] += step
            down[row, column] -= step
            high, low = (p.sum() + 2 * h.sum() for p, h in (plain(up, tokens, 1.3), plain(down, tokens, 1.3)))
            assert float(slope[row, column]) == pytest.approx(float((high - low) / (2 * step)), abs=1e-5)


def test_greedy_decoding_is_read_as_temperature_one() -> None:
    logits, tokens = sample(4, 9)
    assert torch.equal(
        selected_log_probabilities(logits, tokens, 0)[0], selected_log_probabilities(logits, tokens, 1.0)[0]
    )


def test_no_rows_and_no_use_of_the_entropy_are_fine() -> None:
    logits = torch.zeros(0, 7, requires_grad=True)
    selected_log_probabilities(logits, torch.zeros(0, dtype=torch.int64), 1.0)[0].sum().backward()
    assert logits.grad is not None
    assert logits.grad.shape == (0, 7)


def test_bfloat16_logits_are_left_as_they_are_and_computed_in_float32() -> None:
    logits, tokens = sample(6, 33, torch.bfloat16)
    before = logits.detach().clone()
    chosen, _ = selected_log_probabilities(logits, tokens, 0.9)
    chosen.sum().backward()
    assert torch.equal(logits.detach(), before)
    assert chosen.dtype == torch.float32
    torch.testing.assert_close(chosen.double(), plain(logits.detach(), tokens, 0.9)[0], atol=1e-5, rtol=1e-5)
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
