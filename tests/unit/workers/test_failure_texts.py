"""Texts of errors in failures: one line that has the type and the reason."""

import pydantic
import pytest
import torch

from rlhf_workers.failures import describe, failure_of
from rlhf_workers.training.communication.communicator import PeerLostError


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
        ("raise RuntimeError('timed out\\nException raised from wait\\nframe #0: x')", ["RuntimeError: timed out"]),
        ("error = KeyError('a'); error.add_note('in b'); raise error", ["KeyError: 'a'; in b"]),
        ("raise ValueError", ["ValueError"]),
        ("1 +", ["SyntaxError: invalid syntax"]),
    ],
)
def test_a_long_text_becomes_one_line_with_type_and_reason(source: str, words: list[str]) -> None:
    text = describe(raised(source))
    assert all(word in text for word in words), text
    assert "\n" not in text
    assert "frame" not in text


def test_the_advice_after_a_cuda_error_is_left_out_and_a_text_is_bounded() -> None:
    error = torch.AcceleratorError("CUDA error: misaligned address\nCompile with advice.")
    assert failure_of(error, "train").message.endswith("AcceleratorError: CUDA error: misaligned address")
    assert len(describe(ValueError("long\n" * 9999))) == 1000


def test_a_lost_peer_keeps_the_last_error_of_nccl() -> None:
    nccl = RuntimeError("NCCL error, unhandled system error\nncclSystemError: a call failed.\nLast error:\nno route")
    assert PeerLostError("rank 1", nccl).failure.message.endswith("a call failed.; Last error:; no route")
