"""What scoring costs here: every model task on a few made-up samples, alone and in a full batch.

Rule: reward functions and endpoints are not called: they may count, cost money or be slow, and what they take is seen
while the job runs. Nothing is left behind, and time is bounded: beyond the budget a task is measured on a short sample
and a long one.
"""

import time
from collections.abc import Generator, Mapping
from typing import Final

import numpy as np

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey, ScoringSample
from rlhf_workers.inference.model_scorer import PAD, ModelScorer

BUDGET_SECONDS: Final = 0.6
"""Compute time of all tasks."""
LEAST: Final = 2
"""Points of every task, whatever they take."""
REPEATS: Final = 2
"""Timed runs after a warm-up, of which the shortest counts."""
WORD: Final = " a"
"""Repeated, for a reward model with a tokenizer of its own."""
MAX_SAMPLES: Final = 256
"""Of a full batch."""


def measure(
    scorers: Mapping[str, ModelScorer], longest: int, batch_tokens: int
) -> Generator[None, None, list[pb.TaskCost]]:
    """One point a step of the iterator; its return value is the answer. `longest` is the job's longest sample, in
    tokens; `batch_tokens` 0 scores one by one."""
    costs = {task: pb.TaskCost(task=task) for task in scorers}
    spent = 0.0
    for batch, tokens in _grid(longest, batch_tokens):
        for task, scorer in scorers.items():
            if len(costs[task].costs) >= LEAST and spent > BUDGET_SECONDS:
                continue
            started = time.perf_counter()
            seconds = _seconds(scorer, batch, tokens)
            spent += time.perf_counter() - started
            costs[task].costs.add(batch=batch, tokens=tokens, seconds=seconds)
            yield
    return list(costs.values())


def _grid(longest: int, batch_tokens: int) -> list[tuple[int, int]]:
    """(samples, tokens of each). The first two tell what a pass costs and what a token."""
    half, quarter, short = max(longest // 2, 2), max(longest // 4, 2), max(longest // 16, 2)
    grid = [(1, short), (1, half), (1, max(longest, 2)), (1, quarter)]
    if batch_tokens:
        padded = -(-half // PAD) * PAD
        grid.insert(2, (min(max(batch_tokens // padded, 1), MAX_SAMPLES), half))
    return list(dict.fromkeys(grid))


def _seconds(scorer: ModelScorer, batch: int, tokens: int) -> float:
    samples = [_made_up(tokens) for _ in range(batch)]
    scorer.score(samples)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        scorer.score(samples)
        times.append(time.perf_counter() - started)
    return min(times)


def _made_up(tokens: int) -> ScoringSample:
    prompt = max(tokens // 4, 1)
    return ScoringSample(
        key=SampleKey(0, 0, 0),
        prompt=np.zeros(prompt, np.int32),
        response=np.zeros(tokens - prompt, np.int32),
        prompt_text=WORD * prompt,
        response_text=WORD * (tokens - prompt),
        record="{}",
    )
