"""Gradients by name that are to be the same but for rounding."""

import torch


def assert_same_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    """Compares each with the largest number of its tensor as the measure."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        scale = float(expected.abs().max()) or 1.0
        assert float((ours[name] - expected).abs().max()) <= tolerance * scale, name
