"""Texts of errors in failures: one line that has the type and the reason."""

import pydantic
import pytest
import torch

from rlhf_workers.failures import describe, failure_of


class Fields(pydantic.BaseModel):
    width: int


def raised(source: str) -> Exception:
    try:
        exec(source, {"Fields": Fields, "torch": torch})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("Fields(width='x')", ["ValidationError: 1 validation error for Fields", "width", "valid integer"]),
        ("raise ValueError('first\\n\\n  second')", ["ValueError: first; second"]),
        ("raise RuntimeError('NCCL error\\nLast error: no memory')", ["RuntimeError: NCCL error; Last error: no"]),
        ("error = KeyError('a'); error.add_note('in b'); raise error", ["KeyError: 'a'; in b"]),
        ("raise ValueError", ["ValueError"]),
        ("1 +", ["SyntaxError: invalid syntax"]),
    ],
)
def test_a_long_text_becomes_one_line_with_type_and_reason(source: str, words: list[str]) -> None:
    text = describe(raised(source))
    assert all(word in text for word in words), text
    assert "\n" not in text


def test_the_advice_after_a_cuda_error_is_left_out_and_a_text_is_bounded() -> None:
    error = torch.AcceleratorError("CUDA error: misaligned address\nCompile with advice.")
    assert failure_of(error, "train").message.endswith("AcceleratorError: CUDA error: misaligned address")
    assert len(describe(ValueError("long\n" * 9999))) == 1000
