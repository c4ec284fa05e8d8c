"""Uniforms are a standard stream; a token is where its uniform falls; top-p and top-k keep what they should."""

import numpy as np
import pytest
import torch

from rlhf_workers.generation.engine import SamplingParameters
from rlhf_workers.generation.sampling import sample, uniforms


def test_uniforms_are_the_words_of_one_philox_stream_wherever_a_block_starts() -> None:
    stream = np.random.Generator(np.random.Philox(key=2**63 + 5)).random(256)
    for start in (0, 4, 64, 100):
        assert uniforms(2**63 + 5, start, 64).tolist() == stream[start : start + 64].tolist()


def test_uniforms_of_neighbouring_keys_are_unrelated() -> None:
    drawn = np.array([uniforms(key, 0, 64) for key in range(500)])
    assert abs(drawn.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 0.15


def test_a_block_that_is_not_aligned_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        uniforms(1, 2, 4)


def kept_by_hand(probabilities: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """Definition: best first, at most top_k, until top_p of their mass is reached; renormalised."""
    order = np.argsort(-probabilities, kind="stable")[: top_k or None]
    mass = probabilities[order] / probabilities[order].sum()
    count = int(np.searchsorted(np.cumsum(mass), top_p - 1e-12)) + 1
    kept = np.zeros_like(probabilities)
    kept[order[:count]] = probabilities[order[:count]]
    renormalised: np.ndarray = kept / kept.sum()
    return renormalised


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 0), (1.0, 3), (0.6, 5), (0.05, 0), (1.0, 1000)])
def test_tokens_follow_the_kept_distribution_exactly(top_p: float, top_k: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, 12)).float()
    temperature = 1.3
    wanted = kept_by_hand(torch.softmax(logits / temperature, -1).double().numpy(), top_p, top_k)
    grid = torch.arange(20_000, dtype=torch.float64) / 20_000
    tokens, log_probabilities = sample(
        logits.expand(20_000, -1), grid, SamplingParameters(temperature, top_p=top_p, top_k=top_k)
    )
    shares = np.bincount(tokens.numpy(), minlength=12) / 20_000
    np.testing.assert_allclose(shares, wanted, atol=2e-4)
    assert set(np.flatnonzero(shares)) <= set(np.flatnonzero(wanted))
    full = torch.log_softmax(logits / temperature, -1)
    assert torch.equal(log_probabilities, full[tokens])


def test_equal_logits_are_kept_by_lower_id() -> None:
    tokens, _ = sample(torch.zeros(3, 8), torch.tensor([0.0, 0.5, 0.999]), SamplingParameters(top_k=2))
    assert tokens.tolist() == [0, 1, 1]


def test_no_token_of_probability_zero_at_the_ends_of_the_unit_interval() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]]).expand(2, -1)
    tokens, _ = sample(logits, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64), SamplingParameters())
    assert tokens.tolist() == [1, 3]


def test_greedy_takes_the_best_and_reports_it_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    tokens, log_probabilities = sample(logits, torch.zeros(1), SamplingParameters(temperature=0))
    assert tokens.tolist() == [1]
    assert torch.equal(log_probabilities, torch.log_softmax(logits, -1)[:, 1])
