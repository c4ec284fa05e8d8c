"""The event simulation agrees with one that makes every decode step separately, as a worker does."""

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from tests.support.coordinator import random_iterations as make

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.forecast import PREFETCH_SHARE, IterationSetup
from rlhf_planner.inter_stage.simulate import simulate

NEARLY = 1e-9
"""Seconds, much less than any step."""


class StepwiseDecoder:
    """Decodes one step after the other."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.clock = costs, 0.0
        self.held: deque[int] = deque()
        self.rows: dict[int, list[int]] = {}
        """Sample -> [keys, remaining tokens]."""

    def step(self, lengths: Sequence[int], prompts: Sequence[int]) -> list[int]:
        """Return the samples that a step finishes; new ones are prefilled before it."""
        new = [self.held.popleft() for _ in range(min(len(self.held), self.costs.max_batch_size - len(self.rows)))]
        if new:
            self.clock += self.costs.prefill_seconds(len(new), sum(prompts[s] for s in new) / len(new))
        self.rows |= {sample: [prompts[sample], lengths[sample]] for sample in new}
        keys = [row[0] for row in self.rows.values()]
        self.clock += self.costs.decode_seconds(
            len(keys), max(keys) if self.costs.padded else sum(keys) / len(keys)
        )  # fmt: skip
        for row in self.rows.values():
            row[0] += 1
            row[1] -= 1
        done = sorted(sample for sample, row in self.rows.items() if not row[1])
        for sample in done:
            del self.rows[sample]
        return done


def step_by_step(lengths: list[int], layout: IterationSetup, costs: StageCosts) -> list[float]:
    workers = [StepwiseDecoder(costs) for _ in range(layout.generation_workers)]
    capacity = costs.max_batch_size + max(1, costs.max_batch_size // PREFETCH_SHARE)
    queue = deque(range(layout.batch))
    for _ in range(capacity):
        for worker in workers:
            if queue:
                worker.held.append(queue.popleft())
    finish = [0.0] * layout.batch
    while any(worker.held or worker.rows for worker in workers):
        # Whoever ends its step first acts first: a step is made on a copy to see when it would end.
        ends = sorted((_next_end(worker, layout), i) for i, worker in enumerate(workers) if worker.held or worker.rows)
        # Equal but for rounding: who takes the next sample is then a matter of the order of sums.
        assume(not queue or len(ends) < 2 or not 0 < ends[1][0] - ends[0][0] < NEARLY)
        index = ends[0][1]
        for sample in workers[index].step(lengths, layout.prompts):
            finish[sample] = workers[index].clock
            if queue:
                workers[index].held.append(queue.popleft())
    return finish


def _next_end(worker: StepwiseDecoder, layout: IterationSetup) -> float:
    copy = StepwiseDecoder(worker.costs)
    copy.clock, copy.held = worker.clock, deque(worker.held)
    copy.rows = {sample: [*row] for sample, row in worker.rows.items()}
    copy.step([10**9] * layout.batch, layout.prompts)
    return copy.clock


@settings(deadline=None, max_examples=40)
@given(make.iterations(), make.costs())
def test_times_are_those_of_single_steps(iteration: tuple[list[int], IterationSetup], costs: StageCosts) -> None:
    lengths, layout = iteration
    forecast = simulate(lengths, layout, costs)
    one_by_one = step_by_step(lengths, layout, costs)
    assert sorted(forecast.finished) == pytest.approx(sorted(one_by_one), rel=1e-6)
