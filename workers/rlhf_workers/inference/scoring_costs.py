"""Measures the cost of scoring: tasks whose model scores single samples, on artificial ones, alone and in a batch.

Rule: reward functions and endpoints are not called.
"""

import time
from collections.abc import Generator, Mapping
from typing import Final

import numpy as np

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey, ScoringSample
from rlhf_workers.inference.model_scorer import PAD, ModelScorer

BUDGET_SECONDS: Final = 0.6
"""Compute seconds of all tasks after which a task with LEAST points gets no further one."""
LEAST: Final = 2
"""Points of every task that are measured regardless of the budget, or all if there are fewer."""
REPEATS: Final = 2
"""Timed runs after a warm-up; the shortest counts."""
WORD: Final = " a"
"""Text of about one token, repeated for a reward model with its own tokenizer."""
MAX_SAMPLES: Final = 256
"""Maximum samples of a full batch."""


def measure(
    scorers: Mapping[str, ModelScorer], longest: int, batch_tokens: int
) -> Generator[None, None, list[pb.TaskCost]]:
    """Measure one point per step of the iterator; return the costs as its return value.

    `longest`: tokens of the longest sample. `batch_tokens` 0 scores one by one.
    """
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
    """Return (samples, tokens of each), the most important points first."""
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
