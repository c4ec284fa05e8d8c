"""Packed arrays on the wire: little-endian, C order, with dtype and shape. Never pickle.

Rule: unpacking checks that the byte count fits dtype and shape, and refuses any dtype not listed here.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rlhf_api import control_pb2 as pb

DTYPES: Final = frozenset({"int32", "int64", "float32", "float64", "uint8", "bool"})
"""Number types of arrays on the wire."""


def pack(array: npt.NDArray[Any]) -> pb.Array:
    """Return a numpy array as `pb.Array`, shape and values unchanged. Raises ValueError for a dtype not in DTYPES."""
    name = array.dtype.name
    if name not in DTYPES:
        raise ValueError(f"array dtype {name} does not travel; use one of {', '.join(sorted(DTYPES))}")
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return pb.Array(dtype=name, shape=array.shape, data=little.tobytes())


def unpack(array: pb.Array) -> npt.NDArray[Any]:
    """Return a new writable numpy array. Raises ValueError when dtype, shape and byte count disagree."""
    if array.dtype not in DTYPES:
        raise ValueError(f"array dtype {array.dtype!r} does not travel; use one of {', '.join(sorted(DTYPES))}")
    dtype = np.dtype(array.dtype).newbyteorder("<")
    shape = tuple(array.shape)
    expected = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if any(side < 0 for side in shape) or len(array.data) != expected:
        raise ValueError(f"array of {array.dtype} {shape} needs {expected} bytes, got {len(array.data)}")
    return np.frombuffer(array.data, dtype=dtype).astype(np.dtype(array.dtype)).reshape(shape)
