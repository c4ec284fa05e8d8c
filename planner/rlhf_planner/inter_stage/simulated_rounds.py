"""Simulates whole rounds of a job: decoding with fusion, a cut of surplus prompts, and scoring.

`long_rounds` and `length_window` compare ways to put prompts into batches by it, on the same drawn lengths.
Rule: each number of prompts has the fusion that `choose` gives it. Training takes the same time in each iteration; it
really depends on the tokens, whose sum over a period is the same for all ways. The same seed gives the same rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import numpy as np

from rlhf_planner.inter_stage.choose import FusionChoice, choose
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.length_distribution import Floats, Ints
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.simulate import fuses, released_at, simulated_scores, simulated_tail
from rlhf_planner.inter_stage.simulated_generation import generate
from rlhf_planner.inter_stage.simulated_tail import threshold_state

SAMPLES_DRAWN: Final = 32_768
"""Approximate number of samples in all draws together."""
MIN_DRAWS: Final = 3
"""Fewest draws, which a standard error needs."""
MAX_DRAWS: Final = 16


@dataclass(frozen=True)
class PeriodSetup:
    """Inputs of a period, besides lengths and costs."""

    layout: IterationSetup
    """Workers and settings of an iteration; its prompts are ignored."""
    batch: int
    """Prompts of a batch."""
    samples_per_prompt: int
    prompts: Sequence[int]
    """[n] tokens of the next prompts, at least one, in their order. A period with more prompts repeats them."""
    lines: Sequence[int] = ()
    """[n] lines in the prompt file; empty if unknown."""
    cut_by: Literal["Clock", "Counts"] = "Clock"
    training: float = 0.0
    """Seconds of training of an iteration."""
    publishing: float = 0.0
    """Seconds of an iteration after its training."""
    overlapped: bool = False
    """Whether an iteration decodes while the previous one is trained on."""

    def __post_init__(self) -> None:
        if not len(self.prompts):
            raise ValueError("a period needs at least one prompt, got none")
        if len(self.lines) not in (0, len(self.prompts)):
            raise ValueError(f"{len(self.lines)} lines do not belong to {len(self.prompts)} prompts")

    def seconds(self, rollout: float) -> float:
        """Return the seconds of an iteration whose generation and inference take `rollout` seconds."""
        spent = max(rollout, self.training) if self.overlapped else rollout + self.training
        return spent + self.publishing


class Round(NamedTuple):
    """A simulated round."""

    seconds: float
    """Seconds of generation and inference."""
    cut: tuple[int, ...]
    """Prompts that were cut off, by their index in the round."""


def simulate_round(
    lengths: Ints, setup: PeriodSetup, layout: IterationSetup, costs: StageCosts, plan: FusionChoice, model: LengthModel
) -> Round:
    """Simulate a round with response lengths int64 [prompts, samples per prompt]; surplus prompts are cut off.

    `layout` has the prompts of all its samples, `plan` is its fusion.
    """
    surplus = len(lengths) - setup.batch
    shortest = np.argsort(lengths.max(axis=1), kind="stable")[: setup.batch]
    decoded = lengths
    if surplus and setup.cut_by == "Counts":  # a response of a cut prompt counts until it is the longest
        decoded = np.minimum(lengths, lengths[shortest].max())
    generation = generate(decoded.ravel(), layout, costs)
    fused = fuses(plan.threshold, plan.pool, layout)
    state = threshold_state(generation, plan.threshold, model, layout.lines) if fused else None
    tail = simulated_tail(generation, layout, costs, state, plan.pool, plan.transfer)
    finish = (generation.finish if tail is None else tail.finish).reshape(lengths.shape)
    remaining, end = _cut(finish, decoded, shortest, setup) if surplus else (shortest, float(finish.max()))
    scored = np.zeros(len(lengths), dtype=np.bool_)
    scored[remaining] = True
    cut = tuple(np.flatnonzero(~scored).tolist())
    # Samples of prompts that are cut off later are scored in vain, if they are finished before.
    included = (finish <= end) if layout.overlap else np.broadcast_to(scored[:, None], finish.shape)
    tokens = (generation.prompts + generation.lengths).reshape(lengths.shape)
    released = released_at(end, tail, layout, costs)
    scores = simulated_scores(finish[included], tokens[included], end, released, layout, costs)
    return Round(max(end, scores.end), cut)


def _cut(finish: Floats, decoded: Ints, shortest: Ints, setup: PeriodSetup) -> tuple[Ints, float]:
    """Return the prompts that remain, and the time of the cut. All arrays are [prompts, samples per prompt]."""
    done = finish.max(axis=1)
    if setup.cut_by == "Clock":
        first = np.argsort(done, kind="stable")[: setup.batch]
        return first, float(done[first].max())
    longest = decoded[shortest].max()
    others = np.setdiff1d(np.arange(len(done)), shortest)
    as_long = np.where(decoded[others] >= longest, finish[others], np.inf).min(axis=1)
    return shortest, float(max(done[shortest].max(), as_long.max()))


class RoundTrial:
    """Simulated rounds of the next prompts of a job."""

    def __init__(self, model: LengthModel, setup: PeriodSetup, costs: StageCosts, iterations: int, seed: int) -> None:
        """`iterations`: number of batches whose prompts the rounds have."""
        self.model, self.setup, self.costs, self.seed, self.iterations = model, setup, costs, seed, iterations
        repeated = np.arange(iterations * setup.batch) % len(setup.prompts)
        self._prompts = np.asarray(setup.prompts, dtype=np.int64)[repeated]
        lines = setup.lines if len(setup.lines) else np.arange(len(setup.prompts))
        self._lines = np.asarray(lines, dtype=np.int64)[repeated]
        self._plans: dict[int, FusionChoice] = {}

    def draws(self, epochs: int = 1) -> list[Ints]:
        """Return drawn lengths, each int64 [prompts, epochs, samples per prompt].

        A prompt that is repeated counts as another one. All epochs of a prompt share its effect.
        """
        each = self.setup.samples_per_prompt
        count = max(MIN_DRAWS, min(MAX_DRAWS, SAMPLES_DRAWN // (len(self._prompts) * each)))
        generator = np.random.default_rng(self.seed)
        return [self._draw(generator, epochs * each).reshape(-1, epochs, each) for _ in range(count)]

    def _draw(self, generator: np.random.Generator, each: int) -> Ints:
        batch = self.setup.batch
        rounds = [
            self.model.draw(generator, np.repeat(self._prompts[at], each), np.repeat(self._lines[at], each))
            for at in (slice(first, first + batch) for first in range(0, len(self._prompts), batch))
        ]
        return np.concatenate(rounds)

    def round(
        self, lengths: Ints, members: Sequence[int], model: LengthModel | None = None, plan: FusionChoice | None = None
    ) -> Round:
        """Return the round of these prompts; its seconds include training.

        `model`: knowledge of their lengths; None for that of all prompts. `plan`: fusion; None for that of any prompts.
        """
        layout, rows = self.layout(members), np.asarray(members)
        plan = plan or self._plan(len(rows))
        played = simulate_round(lengths[rows], self.setup, layout, self.costs, plan, model or self.model)
        return played._replace(seconds=self.setup.seconds(played.seconds))

    def layout(self, members: Sequence[int]) -> IterationSetup:
        """Return the layout of an iteration with these prompts."""
        rows, each = np.asarray(members), self.setup.samples_per_prompt
        prompts, lines = np.repeat(self._prompts[rows], each), np.repeat(self._lines[rows], each)
        return replace(self.setup.layout, prompts=prompts.tolist(), lines=lines.tolist())

    def plan(self, members: Sequence[int], model: LengthModel) -> FusionChoice:
        """Return the fusion that `choose` gives a round of these prompts."""
        return choose(model, self.layout(members), self.costs, self.seed)

    def _plan(self, prompts: int) -> FusionChoice:
        """Return the fusion of rounds with so many prompts."""
        if prompts not in self._plans:
            self._plans[prompts] = self.plan(range(prompts), self.model)
        return self._plans[prompts]
