"""The window of a sliding layer in a config.json: a whole number, and none where it is off."""

from typing import Any

import pytest

from rlhf_planner.transformer_shape import shape_of

CONFIG: dict[str, Any] = {
    "model_type": "mistral",
    "num_attention_heads": 4,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 128,
}


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 0}, None),
        ({"sliding_window": 16}, 16),
        ({"sliding_window": 16, "use_sliding_window": False}, None),
    ],
)
def test_a_window_is_read_where_it_is_used(fields: dict[str, Any], window: int | None) -> None:
    assert shape_of(CONFIG | fields).window == window


@pytest.mark.parametrize("value", [16.5, "16", True, -1])
def test_a_window_that_is_no_whole_number_is_an_error(value: object) -> None:
    """Fractions were once cut off, and text was read as a number."""
    with pytest.raises(ValueError, match="sliding_window is"):
        shape_of(CONFIG | {"sliding_window": value})
