"""Measures the cost of decoding here: steps over a grid of batch sizes and context lengths, and some prefills.

It runs whole engine steps on artificial samples while the engine's own are put aside, so the cost includes the host.
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
"""Seconds after which no further prefill point is measured, except corners; for decode points, three quarters of it."""
STEPS: Final = 8
"""Maximum timed steps per point; the shortest counts, as other load can only add time."""
POINT_SECONDS: Final = 0.02
"""Timed seconds of a point after which no further step is timed, if two were."""
POINT_BYTES: Final = 2**30
"""Maximum KV bytes of a point on a CPU, except the first; on a GPU the room for caches is the limit."""
ROOM_SHARE: Final = 0.8
"""Share of the free device memory for KV caches; the rest is temporary memory of kernels."""
NO_LIMIT: Final = 2**30
"""Maximum response tokens of an artificial sample, which never finishes."""


class MeasurableEngine(Protocol):
    """The members of the torch engine that `measure` needs."""

    limits: EngineLimits
    deterministic: bool
    device: torch.device

    @property
    def vocabulary(self) -> int:
        """Return the width of the logits."""

    @property
    def moves(self) -> KvMoves:
        """Mover of its caches, which knows the bytes per token."""

    def kv_bytes(self) -> int:
        """Return the bytes of its caches."""

    def step(self) -> StepReport:
        """Run one step of the engine."""

    def aside(self) -> AbstractContextManager[EngineState]:
        """Return a context in which the engine's own samples are put aside."""


def measure(engine: MeasurableEngine) -> Generator[None, None, EngineCosts]:
    """Measure one point per step of the iterator; return the costs as its return value."""
    room = kv_room(engine.device)
    if room:  # the engine's own caches count as free, too
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
    """Return the points of `cost_grid.decode_points`."""
    longest = limits.max_prompt_tokens + limits.max_response_tokens
    if not tiled:
        return decode_points(limits, STEPS)
    return decode_points(
        limits, STEPS, whole=lambda batch: batch % TILE_ROWS == 0, placed=lambda context: _middle(context, longest)
    )


def _middle(context: int, longest: int) -> int:
    """Return three quarters of this context's bucket, within the longest sequence."""
    keys = bucket(context, longest)
    return max(min(3 * keys // 4, longest - STEPS - 2), 1)


def kv_room(device: torch.device) -> int:
    """Return the bytes for KV caches, 0 if host memory is the only limit."""
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
    """Add `batch` samples with `context` cached tokens."""
    response = np.zeros(max(context + 1 - engine.limits.max_prompt_tokens, 0), np.int32)
    prompt = np.zeros(context + 1 - len(response), np.int32)
    slots = np.array([state.table.add(_request(number, prompt, response), context) for number in range(batch)])
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
    """Return an artificial sample with `tokens` tokens to prefill, different from the others."""
    prompt = np.zeros(min(tokens + 1, engine.limits.max_prompt_tokens), np.int32)
    prompt[0] = number % engine.vocabulary
    response = np.zeros(tokens + 1 - len(prompt), np.int32)
    return _request(number, prompt, response)


def _request(number: int, prompt: TokenArray, response: TokenArray) -> SampleRequest:
    versions = (VersionSpan(0, len(response)),) if len(response) else ()
    return SampleRequest(
        SampleKey(0, number, 0), prompt, 0, NO_LIMIT, response, np.zeros(len(response), np.float32), versions
    )
