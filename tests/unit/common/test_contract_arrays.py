"""Packed arrays survive the wire exactly; anything else is rejected."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import DTYPES, pack, unpack

arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)


@given(arrays)
def test_round_trip_is_bitwise(array: np.ndarray) -> None:
    wire = pb.Array.FromString(pack(array).SerializeToString())
    back = unpack(wire)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


@given(arrays)
def test_byte_and_memory_order_do_not_matter(array: np.ndarray) -> None:
    wanted = pack(array)
    assert pack(array.astype(array.dtype.newbyteorder(">"))) == wanted
    assert pack(np.asfortranarray(array) if array.ndim else array) == wanted


@given(arrays, st.binary(min_size=1, max_size=7))
def test_wrong_byte_count_is_refused(array: np.ndarray, extra: bytes) -> None:
    wire = pack(array)
    wire.data += extra
    with pytest.raises(ValueError, match=r"needs \d+ bytes, got"):
        unpack(wire)


@pytest.mark.parametrize("dtype", ["object", "float16", "complex64", "<U3", ""])
def test_other_types_do_not_travel(dtype: str) -> None:
    with pytest.raises(ValueError, match="does not travel; use one of bool, float32"):
        unpack(pb.Array(dtype=dtype, shape=[0], data=b""))


def test_objects_are_not_packed() -> None:
    with pytest.raises(ValueError, match="does not travel"):
        pack(np.array([{}], dtype=object))


@pytest.mark.parametrize("shape", [[-1], [-1, -4], [2**62, 4]])
def test_impossible_shapes_are_refused(shape: list[int]) -> None:
    with pytest.raises(ValueError, match="needs"):
        unpack(pb.Array(dtype="int32", shape=shape, data=b"\0" * 4))
