"""KV caches that a device copies while it decodes: copies are as late as possible, and bitwise the same.

`DelayedCopies` copies on the first wait, and fails if its source changed meanwhile.
"""

from dataclasses import replace

import pytest
import torch
from tests.support.workers.delayed_copies import RUBBISH, DelayedCopies
from tests.support.workers.engine_driving import MakeEngine, finish, requests, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import ResponsePart
from rlhf_workers.devices.copy_stream import HostCopyStream
from rlhf_workers.generation.kv_staging import KvStaging
from rlhf_workers.generation.migration.kv_chunks import IncomingCache, chunks
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.models.kv_slices import KvSlice

HOST = torch.device("cpu")


def rubbish(size: int) -> torch.Tensor:
    return torch.full((size,), RUBBISH, dtype=torch.uint8)


def stage(engine: TorchEngine) -> DelayedCopies:
    """Send an engine's caches through a device's staging."""
    copies = DelayedCopies()
    engine.moves._staging = KvStaging(HOST, copies, rubbish)
    return copies


def received(pieces: list[KvSlice], engine: TorchEngine) -> KvSlice | None:
    """Return the cache that arrives from the sent slices."""
    arrival = IncomingCache(engine.moves.shapes, 1, 400, lambda _: True)
    for piece in pieces:
        for part in chunks(piece):
            arrival.take(pb.KvChunk.FromString(part.chunk.SerializeToString()))
    return arrival.whole(pieces[-1].stop)


@pytest.mark.full
def test_pieces_that_are_copied_after_many_steps_hold_the_cache_as_it_was(make_engine: MakeEngine) -> None:
    samples = requests(4, seed=5, longest=40, response=90)
    undisturbed = finish(make_engine("llama", deterministic=True), samples)
    home, away = (make_engine("llama", deterministic=True) for _ in range(2))
    copies, arriving = stage(home), stage(away)
    home.submit(samples)
    longest = max(undisturbed.values(), key=lambda response: len(response.tokens))
    key, fed = longest.key, 0
    pieces: list[KvSlice] = []
    done: dict[int, ResponsePart] = {}
    for _ in range(4):  # pieces are queued while decoding goes on, across the end of a pool
        for _ in range(len(longest.tokens) // 5):
            done |= {response.key.sample: response for response in home.step().finished}
        cached = home.moves.cached(key)
        assert cached is not None
        pieces.append(home.moves.export(key, fed, cached))
        fed = cached
    assert copies.waits == 0, "the computing thread does not wait"
    assert copies.copied == 0
    carried = home.moves.carried(key)
    home.withdraw([key])  # its rows are free for others before a byte was copied
    done |= finish(home)
    cache = received(pieces, away)
    assert away.moves.reserve()
    away.moves.admit(replace(carried, key=key._replace(attempt=1)), cache)
    assert arriving.waits == 0
    done |= finish(away)
    assert all(same_bits(response, done[number]) for number, response in undisturbed.items())


def test_a_copy_that_is_never_waited_for_harms_nobody(make_engine: MakeEngine) -> None:
    samples = requests(2, seed=6)
    undisturbed = finish(make_engine("llama", deterministic=True), samples)
    home = make_engine("llama", deterministic=True)
    stage(home)
    home.submit(samples)
    home.step()
    cached = home.moves.cached(samples[0].key)
    assert cached
    home.moves.export(samples[0].key, 0, cached)  # the transfer is cancelled
    done = finish(home)
    assert all(same_bits(response, done[number]) for number, response in undisturbed.items())


def test_slices_stay_on_their_side_of_a_gpu() -> None:
    """Fake tensors know devices: gathering happens on the GPU, and one tensor goes to the host, or comes from it."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        gpu = torch.device("cuda", 0)
        staging = KvStaging(gpu, HostCopyStream(), lambda size: torch.empty(size, dtype=torch.uint8))
        pool = torch.empty(4, 2, 64, 8, dtype=torch.bfloat16, device=gpu)
        piece = staging.out([pool[1, :, 3:20], pool[2, :, 3:20]], 3, 20)
        keys, values = piece.layers[0]
        assert keys.device.type == values.device.type == "cpu"
        assert keys.shape == (2, 17, 8)
        memory = torch.empty(2 * 2 * 24 * 8 * 2, dtype=torch.uint8)
        flat = memory.view(torch.bfloat16).view(2, 2, 24, 8)
        cache = KvSlice(0, 17, ((flat[0][:, :17], flat[1][:, :17]),), memory=memory)
        there = staging.into_device(cache)[0]
        assert [(part.device, part.shape, part.stride()) for part in there] == [
            (gpu, part.shape, part.stride()) for part in cache.layers[0]
        ]
