"""Which models can be split over how many devices."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_planner.tensor_split import split_problem

EIGHT_BILLION = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}


@pytest.mark.parametrize("degree", [1, 2, 4, 8, 16, 32])
def test_whole_heads_go_to_every_device_and_few_key_value_heads_to_several(degree: int) -> None:
    assert split_problem(EIGHT_BILLION, degree) == ""


@pytest.mark.parametrize(
    ("config", "degree", "words"),
    [
        (EIGHT_BILLION, 64, "32 attention heads and 8 key-value heads"),
        ({"num_attention_heads": 14, "num_key_value_heads": 2}, 4, "the model's 14 attention heads cannot be split"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "3 key-value heads cannot be split over 4 devices"),
        ({"num_attention_heads": 4, "intermediate_size": 66}, 4, "66 columns of its feed-forward layers"),
        ({"text_config": {"num_attention_heads": 6}}, 4, "6 attention heads"),
    ],
)
def test_what_cannot_be_split_is_said_with_what_can(config: dict[str, Any], degree: int, words: str) -> None:
    problem = split_problem(config, degree)
    assert words.removesuffix(" and 8 key-value heads") in problem
    chosen = int(problem.rpartition(" ")[2])
    assert split_problem(config, chosen) == ""


def test_training_holds_no_key_value_head_twice() -> None:
    assert split_problem(EIGHT_BILLION, 8, several=False) == ""
    problem = split_problem(EIGHT_BILLION, 16, several=False)
    assert problem == "the model's 8 key-value heads cannot be split over 16 devices: use 8"


def test_what_a_configuration_does_not_say_is_not_judged() -> None:
    assert split_problem({}, 8) == ""
    assert split_problem({"num_attention_heads": "many"}, 8) == ""


@given(st.integers(1, 128), st.integers(1, 128), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_a_split_that_is_let_through_gives_every_device_the_same(heads: int, groups: int, degree: int) -> None:
    if not split_problem({"num_attention_heads": heads, "num_key_value_heads": groups}, degree):
        assert heads % degree == 0
        assert groups % degree == 0 or degree % groups == 0
