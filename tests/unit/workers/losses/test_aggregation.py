"""Token weights: sums of weighted losses equal the named means, and exclude abstained samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_workers.losses.aggregation import constant_length_weights, sequence_mean_weights, token_mean_weights


def test_weights_by_hand() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    assert token_mean_weights(mask)[0].tolist() == [0.25] * 3
    assert sequence_mean_weights(mask).tolist() == [pytest.approx([1 / 6] * 3), [0.5, 0, 0], [0, 0, 0]]
    assert constant_length_weights(mask, 10).tolist() == [
        pytest.approx([0.05] * 3),
        pytest.approx([0.05, 0, 0]),
        [0] * 3,
    ]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(6, 50), st.integers(0, 2**16))
def test_weighted_sums_are_the_means_written_out(lengths: list[int], longest: int, seed: int) -> None:
    mask = torch.arange(6)[None, :] < torch.tensor(lengths)[:, None]
    losses = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)).double()
    rows = [losses[row, :length] for row, length in enumerate(lengths) if length]
    tokens = sum(lengths)
    if not tokens:
        for weights in (token_mean_weights(mask), sequence_mean_weights(mask), constant_length_weights(mask, longest)):
            assert not weights.any()
        return
    expected = {
        token_mean_weights(mask): sum(float(row.sum()) for row in rows) / tokens,
        sequence_mean_weights(mask): sum(float(row.mean()) for row in rows) / len(rows),
        constant_length_weights(mask, longest): sum(float(row.sum()) for row in rows) / (len(rows) * longest),
    }
    for weights, mean in expected.items():
        assert float((weights.double() * losses).sum()) == pytest.approx(mean, rel=1e-5, abs=1e-6)
