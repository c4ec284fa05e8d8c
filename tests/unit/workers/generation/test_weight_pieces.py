"""Weights in memory chunks that executor processes map: bitwise complete, with at most one chunk of extra memory."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_common import control_pb2 as pb
from rlhf_workers.generation.vllm_engine.weight_pieces import Named, opened_piece, pieces
from rlhf_workers.shared_memory.host_regions import HostSharing
from rlhf_workers.shared_memory.regions import RegionRefusedError
from rlhf_workers.weights.manifest import WeightManifestError

ELSEWHERE = HostSharing()
"""Maps memory lent by others."""
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def tensors_of(kinds: list[tuple[tuple[int, ...], torch.dtype]]) -> list[Named]:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"layer.{number}", torch.randn(shape, generator=generator).to(dtype))
        for number, (shape, dtype) in enumerate(kinds)
    ]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(SHAPES, TYPES), max_size=8), st.integers(1, 4000))
def test_every_tensor_arrives_once_in_order_and_as_it_was(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], size: int
) -> None:
    sent = tensors_of(kinds)
    came: list[Named] = []
    for message in pieces(iter(sent), ELSEWHERE, size):
        region = pb.WeightLoan.FromString(message)
        names = len(region.manifest.tensors)
        assert names == 1 or sum(tensor.nbytes for _, tensor in sent[len(came) : len(came) + names]) <= size
        came += opened_piece(message, ELSEWHERE).items()
    assert [name for name, _ in came] == [name for name, _ in sent]
    for (_, sent_tensor), (_, arrived) in zip(sent, came, strict=True):
        assert sent_tensor.dtype == arrived.dtype
        assert torch.equal(sent_tensor, arrived)


def test_a_tensor_is_readable_when_its_piece_was_given_up() -> None:
    sent = tensors_of([((300,), torch.float32), ((200,), torch.float32)])
    opened = [opened_piece(message, ELSEWHERE) for message in pieces(sent, ELSEWHERE, 1)]
    assert torch.equal(opened[0]["layer.0"], sent[0][1])
    assert torch.equal(opened[1]["layer.1"], sent[1][1])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda loan: loan.manifest.tensors.add(name="layer.0", dtype="float32"), "twice"),
        (lambda loan: setattr(loan.manifest.tensors[0], "offset", 1 << 20), "ends at byte"),
        (lambda loan: setattr(loan.memory.place, "host", "another"), "another host"),
        (lambda loan: loan.memory.ClearField("host"), "kind that is not used"),
    ],
)
def test_a_piece_that_is_not_what_it_says_is_refused(spoil: Callable[[pb.WeightLoan], object], words: str) -> None:
    for message in pieces(tensors_of([((3,), torch.float32)]), ELSEWHERE):
        loan = pb.WeightLoan.FromString(message)
        spoil(loan)
        with pytest.raises((RegionRefusedError, WeightManifestError), match=words):
            opened_piece(loan.SerializeToString(), ELSEWHERE)
