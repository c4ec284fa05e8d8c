"""What decoding costs here: decode steps over a grid of batch sizes and context lengths, and a few prefills.

Runs whole engine steps on made-up samples while the engine's own are put aside, so the price is that of real work, host
part included. Rule: nothing is left behind: no sample, no cache, no random number, no message. Time is bounded: the
grid is visited from its corners inward and is cut off when the budget is spent, never before batch 1 and the largest
batch were seen at a long and at a short context, and a prefill at two lengths: what was seen at one alone says nothing
of others. A planner interpolates between the points.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

import numpy as np
import torch

from rlhf_common.samples import SampleKey, SampleRequest, TokenArray, VersionSpan
from rlhf_workers.devices.device import free_memory
from rlhf_workers.generation.cost_grid import CORNERS, PREFILL_CORNERS, decode_points, prefill_points
from rlhf_workers.generation.engine import EngineCosts, EngineLimits, KvMoves, PassCost, StepReport
from rlhf_workers.generation.torch_engine.buckets import TILE_ROWS, bucket
from rlhf_workers.generation.torch_engine.engine_state import EngineState
from rlhf_workers.generation.torch_engine.kv_cache import PromptCache
from rlhf_workers.models.kv_slices import KvShape

BUDGET_SECONDS: Final = 0.8
"""Compute time of all points."""
STEPS: Final = 8
"""Timed steps of a point, of which the shortest counts: whatever else the machine does can only add to it."""
POINT_SECONDS: Final = 0.02
"""A point whose steps take long is timed less often, but never less than twice."""
POINT_BYTES: Final = 2**30
"""KV memory of one point on a CPU at most; on a GPU the room for caches is the limit."""
ROOM_SHARE: Final = 0.8
"""Of the free device memory: what KV caches may fill; the rest is for what kernels need for a moment."""
NO_LIMIT: Final = 2**30
"""Response tokens of a made-up sample: it never finishes."""


class MeasurableEngine(Protocol):
    """What `measure` needs of the torch engine."""

    limits: EngineLimits
    deterministic: bool
    device: torch.device

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""

    @property
    def moves(self) -> KvMoves:
        """Say what a token leaves in the cache."""

    def kv_bytes(self) -> int:
        """Memory of the caches that it holds."""

    def step(self) -> StepReport:
        """Decodes one token of every sample that is held."""

    def aside(self) -> AbstractContextManager[EngineState]:
        """Inside, the engine holds no sample of its own."""


def measure(engine: MeasurableEngine) -> Generator[None, None, EngineCosts]:
    """Measure one point of the grid per step of the iterator; its return value is the answer."""
    room = kv_room(engine.device)
    if room:  # what the engine's own caches hold is room for caches, too
        room += engine.kv_bytes()
    most = room if engine.device.type == "cuda" else POINT_BYTES
    spent, decode, prefill = 0.0, [], []
    for number, (batch, context) in enumerate(decode_grid(engine.limits, tiled=engine.deterministic)):
        if number >= CORNERS and spent > 0.75 * BUDGET_SECONDS:
            break
        if number and batch * context * engine.moves.bytes_per_token > most:
            continue
        started = time.perf_counter()
        decode.append(PassCost(batch, context, _decode_seconds(engine, batch, context)))
        spent += time.perf_counter() - started
        yield
    for number, (prompts, tokens) in enumerate(prefill_points(engine.limits, replays=engine.deterministic)):
        if number >= PREFILL_CORNERS and spent > BUDGET_SECONDS:
            break
        started = time.perf_counter()
        prefill.append(PassCost(prompts, tokens, _prefill_seconds(engine, prompts, tokens)))
        spent += time.perf_counter() - started
        yield
    per_token = engine.moves.bytes_per_token
    limit = engine.limits.max_batch_size
    return EngineCosts(tuple(decode), tuple(prefill), per_token, room, limit, engine.deterministic)


def decode_grid(limits: EngineLimits, *, tiled: bool = False) -> list[tuple[int, int]]:
    """Return the points of `cost_grid.decode_points`.

    `tiled` (deterministic jobs): a pass has the rows of whole tiles and the keys of a bucket, so batches go by tiles,
    and a context is the middle of its bucket: a line through the middles is right on average.
    """
    longest = limits.max_prompt_tokens + limits.max_response_tokens
    if not tiled:
        return decode_points(limits, STEPS)
    return decode_points(
        limits, STEPS, whole=lambda batch: batch % TILE_ROWS == 0, placed=lambda context: _middle(context, longest)
    )


def _middle(context: int, longest: int) -> int:
    """The context in the middle of those that are decoded in passes of the same key length."""
    keys = bucket(context, longest)
    return max(min(3 * keys // 4, longest - STEPS - 2), 1)


def kv_room(device: torch.device) -> int:
    """Return the bytes for KV caches, 0 where host memory is the only limit."""
    if device.type != "cuda":
        return 0
    return int(ROOM_SHARE * free_memory(device))


def _decode_seconds(engine: MeasurableEngine, batch: int, context: int) -> float:
    with engine.aside() as state:
        _fill(engine, state, batch, context)
        engine.step()  # proves batch shapes, warms kernels up
        times: list[float] = []
        while len(times) < 2 or (len(times) < STEPS and sum(times) < POINT_SECONDS):
            started = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - started)
    return min(times)


def _fill(engine: MeasurableEngine, state: EngineState, batch: int, context: int) -> None:
    """`batch` samples with `context` tokens in their caches."""
    known = np.zeros(max(context + 1 - engine.limits.max_prompt_tokens, 0), np.int32)
    prompt = np.zeros(context + 1 - len(known), np.int32)
    slots = np.array([state.table.add(_request(number, prompt, known), context) for number in range(batch)])
    cache = _empty_cache(engine.moves.shapes, context, engine.device)
    state.pools.place(slots, state.table.position[slots], cache, np.zeros(batch, np.int64))


def _empty_cache(shapes: Sequence[KvShape], tokens: int, device: torch.device) -> PromptCache:
    cache = PromptCache()
    for layer, shape in enumerate(shapes):
        sizes = (shape.key_size, shape.value_size)
        keys, values = (torch.zeros(1, shape.heads, tokens, size, dtype=shape.dtype, device=device) for size in sizes)
        cache.states[layer] = keys, values
    return cache


def _prefill_seconds(engine: MeasurableEngine, prompts: int, tokens: int) -> float:
    times: list[float] = []
    for _ in range(2):
        with engine.aside() as state:
            state.queue.extend(_prompt(engine, number, tokens) for number in range(prompts))
            started = time.perf_counter()
            report = engine.step()
            times.append(min(report.prefill_ns / 1e9, time.perf_counter() - started))
    return min(times)


def _prompt(engine: MeasurableEngine, number: int, tokens: int) -> SampleRequest:
    """A made-up sample of which so many tokens are prefilled; no two are alike."""
    prompt = np.zeros(min(tokens + 1, engine.limits.max_prompt_tokens), np.int32)
    prompt[0] = number % engine.vocabulary
    known = np.zeros(tokens + 1 - len(prompt), np.int32)
    return _request(number, prompt, known)


def _request(number: int, prompt: TokenArray, known: TokenArray) -> SampleRequest:
    versions = (VersionSpan(0, len(known)),) if len(known) else ()
    return SampleRequest(
        SampleKey(0, number, 0), prompt, 0, NO_LIMIT, known, np.zeros(len(known), np.float32), versions
    )
