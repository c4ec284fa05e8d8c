"""Packed arrays in messages: little-endian, C order, with dtype and shape; no pickle.

Rule: unpacking checks dtype and byte count.
"""

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rlhf_common import control_pb2 as pb

DTYPES: Final = frozenset({"int32", "int64", "float32", "float64", "uint8", "bool"})
"""Number types of arrays in messages."""
_ON_THE_WIRE: Final = {name: np.dtype(name).newbyteorder("<") for name in DTYPES}
_NATIVE: Final = {name: np.dtype(name) for name in DTYPES}


def pack(array: npt.NDArray[Any]) -> pb.Array:
    """Return a numpy array as `pb.Array` with the same shape and values. Raises ValueError for a dtype not in
    DTYPES."""
    name = array.dtype.name
    if name not in DTYPES:
        raise ValueError(f"array dtype {name} does not travel; use one of {', '.join(sorted(DTYPES))}")
    return pb.Array(dtype=name, shape=array.shape, data=array.astype(_ON_THE_WIRE[name], copy=False).tobytes())


def unpack(array: pb.Array) -> npt.NDArray[Any]:
    """Return a new writable numpy array. Raises ValueError for a dtype not in DTYPES, or if dtype, shape and byte count
    disagree.
    """
    name, data, shape = array.dtype, array.data, tuple(array.shape)
    dtype = _ON_THE_WIRE.get(name)
    if dtype is None:
        raise ValueError(f"array dtype {name!r} does not travel; use one of {', '.join(sorted(DTYPES))}")
    expected = dtype.itemsize * math.prod(shape)
    if len(data) != expected or any(side < 0 for side in shape):
        raise ValueError(f"array of {name} {shape} needs {expected} bytes, got {len(data)}")
    return np.frombuffer(data, dtype=dtype).astype(_NATIVE[name]).reshape(shape)
