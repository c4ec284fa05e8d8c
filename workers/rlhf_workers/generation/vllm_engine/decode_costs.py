"""What decoding costs on vLLM: steps of the real core over a grid of batch sizes and context lengths, and prefills.

Made-up requests go through scheduler, model and sampler while the engine's own are put aside with their caches, so the
price is that of real work. A decode point takes blocks for its contexts and reads what lies in them, without a prefill.
Rule: nothing is left behind: no request, no block, and no cached prefix that a sample could hit. Time is bounded: the
grid is visited from its corners inward, a point a step of the iterator, and is cut off when the budget is spent, never
before the corners. A batch that does not fit beside the caches that are held is a smaller one.
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
"""Compute time of all points: those of the torch engine take 0.8, and a step of vLLM has more around its model."""
STEPS: Final = 6
"""Timed steps of a point, of which the shortest counts: whatever else the machine does can only add to it."""
POINT_SECONDS: Final = 0.05
"""A point whose steps take long is timed less often, but never less than twice."""
PREFILL_TRIES: Final = 2


class MeasurableCore(Protocol):
    """What `measure` needs of vLLM's core."""

    def fitting(self, tokens: int) -> int:
        """Return how many more requests of so many tokens the caches have room for."""

    def aside(self) -> AbstractContextManager[None]:
        """Inside, the core schedules no request that it held before."""

    def add(self, request: CoreRequest) -> None:
        """Takes a request up."""

    def add_cached(self, request: CoreRequest, cached: int) -> None:
        """Takes a request up as if the caches of its first tokens were there."""

    def abort(self, names: Sequence[str]) -> None:
        """Drops requests."""

    def step(self) -> CoreStep:
        """Decodes one token of every request."""


_NUMBERS: Final = count()
"""Of made-up requests: no name comes twice in a process."""


def measure(core: MeasurableCore, limits: EngineLimits, caches: tuple[int, int]) -> Generator[None, None, EngineCosts]:
    """Measure one point per step of the iterator; its return value is the answer. `caches`: bytes of all caches, and
    the tokens that they have room for."""
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
    """Seconds of a step that decodes one token of each of `batch` requests with `context` keys."""
    taken = list(islice(names, batch))
    times: list[float] = []
    with core.aside(), torch.inference_mode():
        try:
            for name in taken:
                core.add_cached(_request(name, context + 1, STEPS + 1), context)
            core.step()  # takes them up, and warms kernels up
            while len(times) < 2 or (len(times) < STEPS - 1 and sum(times) < POINT_SECONDS):
                started = time.perf_counter()
                core.step()
                times.append(time.perf_counter() - started)
        finally:
            core.abort(taken)
    return min(times)


def _prefill_seconds(core: MeasurableCore, names: Iterator[str], prompts: int, tokens: int) -> float:
    """Seconds until `prompts` requests of `tokens` tokens each went through the model, in as many steps as it takes."""
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
    """A made-up request; its name salts its blocks, so that no other one ever finds them."""
    return CoreRequest(name, [0] * tokens, tokens, new_tokens, (), 0, salt=name)
