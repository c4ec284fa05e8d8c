"""Encodes and decodes `WeightChunk`, a part of a tensor, without protobuf's copies of its bytes.

Rule: any protobuf reader understands the encoded messages. Must never trust a length: a truncated or malformed message
is refused.
"""

from dataclasses import dataclass
from typing import Final

from rlhf_common import control_pb2 as pb

NAME: Final = 1 << 3 | 2
OFFSET: Final = 2 << 3
DATA: Final = 3 << 3 | 2
"""Tags: field number and wire type."""
LONGEST_VARINT: Final = 10
"""Maximum bytes of a 64-bit varint."""
FETCH: Final = f"/{pb.DESCRIPTOR.services_by_name['WeightSource'].full_name}/Fetch"
"""gRPC method with these messages."""


@dataclass(frozen=True)
class ReceivedChunk:
    """Content of a message; `data` is part of the message's own memory, unless protobuf decoded it."""

    name: str
    offset: int
    data: memoryview


def encode(name: str, offset: int, data: memoryview) -> bytes:
    """Return the message for `data`, the bytes at `offset` of a tensor."""
    text = name.encode()
    head = bytearray([NAME]) + _varint(len(text)) + text
    if offset:  # protobuf leaves out zeros
        head += bytes([OFFSET]) + _varint(offset)
    if len(data):
        head += bytes([DATA]) + _varint(len(data))
    return b"".join((head, data))


def decode(message: bytes) -> ReceivedChunk:
    """Return the content of a message; protobuf's DecodeError if it is not a `WeightChunk`."""
    return _in_order(message) or _by_protobuf(message)


def _in_order(message: bytes) -> ReceivedChunk | None:
    """Return name, offset (0 if absent) and data, if they come once each, in this order, with no other field; else
    None."""
    place, size, offset = 0, len(message), 0
    if not size or message[place] != NAME:
        return None
    length, place = _read_varint(message, place + 1)
    end = place + length
    if length < 0 or end > size:
        return None
    try:
        name = message[place:end].decode()
    except UnicodeDecodeError:
        return None
    place = end
    if place < size and message[place] == OFFSET:
        offset, place = _read_varint(message, place + 1)
    if not 0 <= offset < 1 << 63 or place >= size or message[place] != DATA:
        return None
    length, place = _read_varint(message, place + 1)
    if length < 0 or place + length != size:
        return None
    return ReceivedChunk(name, offset, memoryview(message)[place:])


def _by_protobuf(message: bytes) -> ReceivedChunk:
    chunk = pb.WeightChunk.FromString(message)
    return ReceivedChunk(chunk.name, chunk.offset, memoryview(chunk.data))


def _varint(number: int) -> bytes:
    """Encode a number of 0 or more: 7 bits per byte, lowest first."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    """Return the number at a position and the position after it; -1 for a malformed or truncated varint."""
    number = 0
    for index in range(LONGEST_VARINT):
        if place + index >= len(message):
            break
        byte = message[place + index]
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, place + index + 1
    return -1, place
