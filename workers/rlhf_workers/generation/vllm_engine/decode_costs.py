"""Measures the cost of decoding on vLLM: real steps over a grid of batch sizes and context lengths, and prefills.

Artificial requests go through scheduler, model and sampler while the engine's own are put aside with their caches. A
batch that does not fit beside the current caches is made smaller.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count, islice
from typing import Final, Protocol

import torch

from rlhf_workers.generation.cost_grid import CORNERS, PREFILL_CORNERS, decode_points, prefill_points
from rlhf_workers.generation.engine import EngineCosts, EngineLimits, PassCost
from rlhf_workers.generation.vllm_engine.core import CoreRequest, CoreStep

BUDGET_SECONDS: Final = 1.2
"""Seconds after which no further prefill point is measured, except corners; for decode points, three quarters of it."""
STEPS: Final = 6
"""Maximum steps per point; the first is not timed, and the shortest counts, as other load can only add time."""
POINT_SECONDS: Final = 0.05
"""Timed seconds of a point after which no further step is timed, if two were."""
PREFILL_TRIES: Final = 2


class MeasurableCore(Protocol):
    """The methods of vLLM's core that `measure` needs."""

    def fitting(self, tokens: int) -> int:
        """Return how many more requests of `tokens` tokens fit into the caches."""

    def aside(self) -> AbstractContextManager[None]:
        """Return a context in which the current requests are put aside."""

    def add(self, request: CoreRequest) -> None:
        """Add a request."""

    def add_cached(self, request: CoreRequest, cached: int) -> None:
        """Add a request as if its first tokens were in the caches."""

    def abort(self, names: Sequence[str]) -> None:
        """Drop requests."""

    def step(self) -> CoreStep:
        """Run one step of the core."""


_NUMBERS: Final = count()
"""Numbers of artificial requests; unique in a process."""


def measure(core: MeasurableCore, limits: EngineLimits, caches: tuple[int, int]) -> Generator[None, None, EngineCosts]:
    """Measure one point per step of the iterator; return the costs as its return value.

    `caches`: bytes of all caches, and the tokens that fit.
    """
    names = (f"measured-{number}" for number in _NUMBERS)
    decode: list[PassCost] = []
    prefill: list[PassCost] = []
    spent = 0.0
    for number, (batch, context) in enumerate(decode_points(limits, STEPS)):
        if number >= CORNERS and spent > 0.75 * BUDGET_SECONDS:
            break
        rows = min(batch, core.fitting(context + STEPS + 1))
        if not rows or any((cost.batch, cost.tokens) == (rows, context) for cost in decode):
            continue
        started = time.perf_counter()
        decode.append(PassCost(rows, context, _decode_seconds(core, names, rows, context)))
        spent += time.perf_counter() - started
        yield
    for number, (prompts, tokens) in enumerate(prefill_points(limits, replays=False)):
        if number >= PREFILL_CORNERS and spent > BUDGET_SECONDS:
            break
        rows = min(prompts, core.fitting(tokens + 1))
        if not rows:
            continue
        started = time.perf_counter()
        prefill.append(PassCost(rows, tokens, _prefill_seconds(core, names, rows, tokens)))
        spent += time.perf_counter() - started
        yield
    room, tokens = caches
    return EngineCosts(tuple(decode), tuple(prefill), room // tokens, room, limits.max_batch_size, False)


def _decode_seconds(core: MeasurableCore, names: Iterator[str], batch: int, context: int) -> float:
    """Return the seconds of a step that decodes one token for each of `batch` requests with `context` keys."""
    taken = list(islice(names, batch))
    times: list[float] = []
    with core.aside(), torch.inference_mode():
        try:
            for name in taken:
                core.add_cached(_request(name, context + 1, STEPS + 1), context)
            core.step()  # admits them, and warms kernels up
            while len(times) < 2 or (len(times) < STEPS - 1 and sum(times) < POINT_SECONDS):
                started = time.perf_counter()
                core.step()
                times.append(time.perf_counter() - started)
        finally:
            core.abort(taken)
    return min(times)


def _prefill_seconds(core: MeasurableCore, names: Iterator[str], prompts: int, tokens: int) -> float:
    """Return the seconds to prefill `prompts` requests of `tokens` tokens each, in as many steps as needed."""
    times: list[float] = []
    for _ in range(PREFILL_TRIES):
        taken = list(islice(names, prompts))
        with core.aside(), torch.inference_mode():
            try:
                for name in taken:
                    core.add(_request(name, tokens, 1))
                left, started = set(taken), time.perf_counter()
                while left:
                    left.difference_update(drawn.name for drawn in core.step().drawn)
                times.append(time.perf_counter() - started)
            finally:
                core.abort(taken)
    return min(times)


def _request(name: str, tokens: int, new_tokens: int) -> CoreRequest:
    """Return an artificial request; its name salts its blocks, so that no other request finds them."""
    return CoreRequest(name, [0] * tokens, tokens, new_tokens, (), 0, salt=name)
