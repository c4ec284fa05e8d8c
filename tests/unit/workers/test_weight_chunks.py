"""Parts of weights on the wire: compatible with protobuf in both directions, and strict about anything else."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from rlhf_common import control_pb2 as pb
from rlhf_common.control_pb2_grpc import WeightSourceStub
from rlhf_workers.peer_server import start_server
from rlhf_workers.weights.chunks import decode, encode
from rlhf_workers.weights.source import WeightSourceService

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=200)
OFFSETS = st.integers(0, (1 << 63) - 1)


@given(NAMES, OFFSETS, st.binary(max_size=400))
def test_protobuf_reads_what_is_written(name: str, offset: int, data: bytes) -> None:
    message = encode(name, offset, memoryview(data))
    chunk = pb.WeightChunk.FromString(message)
    assert (chunk.name, chunk.offset, chunk.data) == (name, offset, data)
    assert message == chunk.SerializeToString()


@given(st.text(st.characters(codec="utf-8"), max_size=200), st.integers(-(1 << 63), (1 << 63) - 1), st.binary())
def test_what_protobuf_writes_is_read(name: str, offset: int, data: bytes) -> None:
    found = decode(pb.WeightChunk(name=name, offset=offset, data=data).SerializeToString())
    assert (found.name, found.offset, bytes(found.data)) == (name, offset, data)


@given(st.binary(max_size=60))
def test_bytes_of_a_stranger_mean_what_protobuf_says(message: bytes) -> None:
    try:
        wanted = pb.WeightChunk.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            decode(message)
        return
    found = decode(message)
    assert (found.name, found.offset, bytes(found.data)) == (wanted.name, wanted.offset, wanted.data)


def test_fields_in_another_order_and_unknown_ones_are_read() -> None:
    whole = pb.WeightChunk(name="a", offset=7, data=b"xyz")
    data_first = (
        pb.WeightChunk(data=b"xyz").SerializeToString() + pb.WeightChunk(name="a", offset=7).SerializeToString()
    )
    unknown = whole.SerializeToString() + bytes([4 << 3, 1])  # a field of a later version
    for message in (data_first, unknown):
        found = decode(message)
        assert (found.name, found.offset, bytes(found.data)) == ("a", 7, b"xyz")


class OneMatrix:
    """A WeightProvider with one matrix."""

    weight = torch.arange(6, dtype=torch.float32).view(2, 3)

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the matrix."""
        yield "weight", self.weight


def test_a_reader_of_the_generated_messages_is_served() -> None:
    async def fetched() -> list[pb.WeightChunk]:
        matrix = OneMatrix()
        server = await start_server("127.0.0.1:0", None, WeightSourceService(lambda: matrix))
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                return [chunk async for chunk in WeightSourceStub(channel).Fetch(pb.WeightRequest(model="actor"))]
        finally:
            await server.stop()

    (chunk,) = asyncio.run(fetched())
    assert (chunk.name, chunk.offset) == ("weight", 0)
    assert chunk.data == OneMatrix.weight.numpy().tobytes()
