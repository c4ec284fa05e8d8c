"""Uniforms are a standard stream; a uniform selects the token; top-p and top-k keep the right tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_workers.generation.engine import SamplingParameters
from rlhf_workers.generation.sampling import _draw, _draw_by_parts, _truncate, sample, uniforms


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
    """The definition: best first, at most top_k, until top_p of their mass is reached; renormalised."""
    order = np.argsort(-probabilities, kind="stable")[: top_k or None]
    mass = probabilities[order] / probabilities[order].sum()
    count = int(np.searchsorted(np.cumsum(mass), top_p - 1e-12)) + 1
    filtered = np.zeros_like(probabilities)
    filtered[order[:count]] = probabilities[order[:count]]
    renormalised: np.ndarray = filtered / filtered.sum()
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


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 3000),
    spread=st.floats(0, 30),
    top_k=st.sampled_from([0, 1, 7, 2000]),
    ends=st.booleans(),
)
def test_a_token_drawn_part_by_part_is_the_one_drawn_at_once(
    seed: int, size: int, spread: float, top_k: int, ends: bool
) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(0, spread, (4, size)))
    weights = _truncate(torch.softmax(logits, -1), SamplingParameters(top_k=top_k))
    uniform = torch.tensor([0.0, 0.5, 1 - 2.0**-53, 2.0**-60]) if ends else torch.from_numpy(random.random(4))
    tokens, at_once = _draw_by_parts(weights, uniform.double()), _draw(weights, uniform.double())
    cumulative = weights.cumsum(-1)
    aim, first, last = uniform * cumulative[:, -1], torch.minimum(tokens, at_once), torch.maximum(tokens, at_once)
    # Sums of another order end a token a few roundings earlier or later. What falls just there may fall on any of the
    # neighbours that lie within these roundings, which are many where the weights are tiny.
    end_of_first = cumulative.gather(1, first[:, None])[:, 0]
    start_of_last = (cumulative - weights).gather(1, last[:, None])[:, 0]
    within_roundings = ((end_of_first - aim).abs() <= 1e-14 * size) & ((start_of_last - aim).abs() <= 1e-14 * size)
    assert ((tokens == at_once) | within_roundings).all()
    assert (weights.gather(1, tokens[:, None]) > 0).all()
