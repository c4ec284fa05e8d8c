"""Cuts KV caches into chunks with checksums for transfer, and joins them again in host memory.

Rule: an arrival takes only chunks that continue it, with the model's shapes and the announced checksum.
"""

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import torch

from rlhf_common import control_pb2 as pb
from rlhf_common.channels import CHUNK_BYTES
from rlhf_workers.models.kv_slices import KvShape, KvSlice

log = logging.getLogger(__name__)

WIRE: Final[dict[torch.dtype, tuple[str, torch.dtype]]] = {
    torch.float32: ("float32", torch.float32),
    torch.float16: ("float16", torch.float16),
    torch.bfloat16: ("uint16", torch.int16),
}
"""dtype of a cache -> its name in messages, and a type of the same size that numpy has too."""
ALIGNMENT: Final = 256
"""Alignment of each layer's keys and values in an arrival's memory, in bytes."""
GROWTH_TOKENS: Final = 64
"""Initial capacity in positions beyond those expected, as a sample may grow while it is sent."""


class KvRefusedError(Exception):
    """An arrival cannot be taken; the message says why."""


def chunks(piece: KvSlice) -> Iterator[pb.KvPart]:
    """Yield the messages for part of a cache once it is ready: by layer, keys before values, in order of positions."""
    piece.ready()
    for layer, states in enumerate(piece.layers):
        for kind, part in enumerate(states):
            heads, tokens, size = part.shape
            most = max(CHUNK_BYTES // (heads * size * part.element_size()), 1)
            name, numpy_type = WIRE[part.dtype]
            for start in range(0, tokens, most):
                cut = part[:, start : start + most].contiguous()
                data = cut.view(numpy_type).numpy().tobytes()
                array = pb.Array(dtype=name, shape=cut.shape, data=data)
                position = piece.start + start
                yield pb.KvPart(
                    chunk=pb.KvChunk(
                        layer=layer, values=kind == 1, position=position, data=array, crc32=zlib.crc32(data)
                    )
                )


class IncomingCache:
    """The cache of one sample while it arrives."""

    def __init__(
        self,
        shapes: Sequence[KvShape],
        expected: int,
        longest: int,
        allow: Callable[[int], bool],
        *,
        pinned: bool = False,
    ) -> None:
        """`expected` positions are allocated at first, `longest` at most; `pinned` if a device will copy it.

        `allow` is asked before bytes of keys and values are allocated; a negative number returns bytes. KvRefusedError
        if it returns False.
        """
        self._pinned = pinned
        self._shapes = shapes
        self._longest = longest
        self._allow = allow
        self._bytes_per_token = sum(shape.bytes for shape in shapes)
        self._filled = [[0, 0] for _ in shapes]
        self._capacity = 0
        self._memory: torch.Tensor | None = None
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.received = 0
        """Data bytes taken so far."""
        self._grow(min(expected + GROWTH_TOKENS, longest))

    def take(self, chunk: pb.KvChunk) -> None:
        """Add a chunk; KvRefusedError if it does not fit, is damaged, or there is no memory for it."""
        where = f"{'values' if chunk.values else 'keys'} of layer {chunk.layer} from position {chunk.position}"
        if not 0 <= chunk.layer < len(self._shapes):
            raise KvRefusedError(f"{where}: the model has {len(self._shapes)} layers")
        filled, shape = self._filled[chunk.layer], self._shapes[chunk.layer]
        size = shape.value_size if chunk.values else shape.key_size
        name, numpy_type = WIRE[shape.dtype]
        if len(chunk.data.shape) != 3 or chunk.position != filled[chunk.values]:
            raise KvRefusedError(f"{where} came where position {filled[chunk.values]} was due")
        heads, tokens, width = chunk.data.shape
        if (chunk.data.dtype, heads, width) != (name, shape.heads, size) or tokens < 1:
            received = f"{chunk.data.dtype} {list(chunk.data.shape)}"
            raise KvRefusedError(f"{where}: {received} is not {name} [{shape.heads}, tokens, {size}]")
        data = chunk.data.data
        if len(data) != heads * tokens * width * shape.dtype.itemsize:
            raise KvRefusedError(f"{where}: {len(data)} bytes are not {list(chunk.data.shape)} of {name}")
        if zlib.crc32(data) != chunk.crc32:
            raise KvRefusedError(f"{where}: checksum is {zlib.crc32(data):08x}, announced {chunk.crc32:08x}")
        stop = chunk.position + tokens
        if stop > self._longest:
            raise KvRefusedError(f"{where}: position {stop} is beyond the sample's {self._longest}")
        if stop > self._capacity:
            self._grow(min(max(2 * self._capacity, stop), self._longest))
        numbers = np.frombuffer(data, dtype=torch.empty(0, dtype=numpy_type).numpy().dtype)
        target = self._parts[chunk.layer][chunk.values].view(numpy_type).numpy()
        target[:, chunk.position : stop] = numbers.reshape(heads, tokens, width)
        filled[chunk.values] = stop
        self.received += len(data)

    def whole(self, positions: int) -> KvSlice | None:
        """Return the cache of exactly `positions` positions (None for 0); KvRefusedError if a layer has another
        number."""
        for layer, filled in enumerate(self._filled):
            if filled != [positions, positions]:
                raise KvRefusedError(f"{positions} positions were handed over, layer {layer} has {min(filled)}")
        if not positions:
            return None
        layers = tuple((k[:, :positions], v[:, :positions]) for k, v in self._parts)
        return KvSlice(0, positions, layers, memory=self._memory)

    def close(self) -> None:
        """Release the memory, and return its bytes to `allow`."""
        self._parts, self._memory = [], None
        self._allow(-self._capacity * self._bytes_per_token)
        self._capacity = 0

    def _grow(self, capacity: int) -> None:
        """Replace the buffer by one for `capacity` positions; an error leaves the earlier one."""
        size = capacity * self._bytes_per_token
        if not self._allow(size):
            raise KvRefusedError(f"no memory for {capacity} positions of {self._bytes_per_token} bytes")
        try:
            memory, parts = self._buffer(capacity)
        except BaseException:
            self._allow(-size)
            raise
        for before, after in zip(self._parts, parts, strict=False):  # none at first
            for earlier, part in zip(before, after, strict=True):
                part[:, : self._capacity] = earlier
        self._memory, self._parts = memory, parts
        self._allow(-self._capacity * self._bytes_per_token)
        self._capacity = capacity

    def _buffer(self, capacity: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return new memory, and each layer's keys and values [heads, capacity, size] in it."""
        sizes = [size for shape in self._shapes for size in (shape.key_size, shape.value_size)]
        sides = [(shape.heads, capacity) for shape in self._shapes for _ in range(2)]
        types = [shape.dtype for shape in self._shapes for _ in range(2)]
        ends = [0]
        for (heads, tokens), size, dtype in zip(sides, sizes, types, strict=True):
            ends.append(-(-(ends[-1] + heads * tokens * size * dtype.itemsize) // ALIGNMENT) * ALIGNMENT)
        memory = host_memory(ends[-1], pinned=self._pinned)
        parts: list[torch.Tensor] = []
        for first, (heads, tokens), size, dtype in zip(ends, sides, sizes, types, strict=False):
            flat = memory[first : first + heads * tokens * size * dtype.itemsize]
            parts.append(flat.view(dtype).view(heads, tokens, size))
        return memory, list(zip(parts[::2], parts[1::2], strict=True))


def host_memory(size: int, *, pinned: bool) -> torch.Tensor:
    """Return uint8 [size] of host memory; pinned if `pinned`, unless pinning fails."""
    if pinned:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            log.warning("%d bytes for a KV cache that arrives are not pinned: %s", size, error)
    return torch.empty(size, dtype=torch.uint8)
