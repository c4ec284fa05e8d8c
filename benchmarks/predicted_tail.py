"""How far off the planner's prediction of a long tail is where no machine disturbs it: none, drafts, fusion and both.

    python -m benchmarks.predicted_tail [--iterations 40] [--times 1] [--json]

Two made-up workers of the pace of `long_tail_job`'s paced-E decode 96 samples, token by token, of which one in fifteen
goes on twenty times as long. Drafts of four tokens are right by chance, the more likely the longer a sample's text is.
What steps took and gave is told as real workers tell it, in stretches of half a second, and each iteration is predicted
by what those before it taught: by the lengths that come out, and by lengths that are drawn as a plan does it. The
second is what cannot be known beforehand; the first is the simulation's own error. Moves cost nothing here. Printed are
the median error and its 10th and 90th percentile, over all iterations but the first three. The same on every machine.
`--times` is how many times as long everything takes: of slow steps few are made in a stretch.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import DecodeLines, StepTime
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.simulate import simulate
from rlhf_planner.speculation.observed_gain import DraftedSteps, observed_forecast

Ints = npt.NDArray[np.int64]

SAMPLES: Final = 96
PROMPT: Final = 4
LIMIT: Final = 1024
ROWS: Final = 48
DRAFT: Final = 4
"""Tokens of a draft."""
FIRST_DRAFT: Final = 12
"""Tokens that a sample has before anything of it comes again."""
SURE: Final = 25
"""Tokens from which on drafts are right more often."""
STRETCH_SECONDS: Final = 0.5
WARM_UP: Final = 3
DRAWS: Final = 16
CASES: Final = {"none": (False, 0), "drafts": (True, 0), "fusion": (False, 16), "both": (True, 16)}
"""Whether it drafts, and the threshold R_t."""


class Errors(NamedTuple):
    """Predicted over true seconds, less 1, of every iteration that counts."""

    lengths_known: list[float]
    lengths_drawn: list[float]


def step_seconds(rows: float, keys: float) -> float:
    """Return what a pass takes."""
    return 6e-3 + 5e-5 * rows + 1e-7 * keys


def costs(times: float) -> StageCosts:
    """Return the costs of plain steps, which are known."""
    steps = [
        StepTime(batch, context, times * step_seconds(batch, batch * context))
        for batch in (1, 2, 4, 8, 16, 32, ROWS)
        for context in (64, LIMIT)
    ]
    return StageCosts(DecodeLines.fitted(steps), ROWS, kv_bytes_per_token=1e3, bandwidth=4e8, padded=False)


def draw_lengths(random: np.random.Generator) -> Ints:
    """Return a batch's lengths."""
    goes_on = random.random(SAMPLES) < 1 / 15
    lengths = np.where(goes_on, random.geometric(1 / 560, SAMPLES), random.geometric(1 / 28, SAMPLES))
    return np.minimum(LIMIT, lengths).astype(np.int64)


@dataclass
class _MadeUpWorker:
    """What it decodes, and the stretch that it has not told of."""

    rows: list[list[int]]
    """(sample, tokens)."""
    times: float
    """How many times as long it takes."""
    clock: float = 0.0
    stretch: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Steps, samples, keys, tokens, seconds."""

    def step(self, lengths: Sequence[int], random: np.random.Generator | None) -> None:
        """Decode a step; `random` None: without drafts."""
        keys = sum(PROMPT + tokens for _, tokens in self.rows)
        drafted = 0 if random is None else DRAFT * sum(tokens >= FIRST_DRAFT for _, tokens in self.rows)
        read = keys * (len(self.rows) + drafted) / len(self.rows)
        seconds = self.times * step_seconds(len(self.rows) + drafted, read)
        before = sum(tokens for _, tokens in self.rows)
        for row in self.rows:
            accepted = 0 if random is None or row[1] < FIRST_DRAFT else _accepted(row[1], random)
            row[1] = min(row[1] + 1 + accepted, lengths[row[0]])
        drawn = sum(tokens for _, tokens in self.rows) - before
        sums = (1.0, float(len(self.rows)), float(keys), float(drawn), seconds)
        self.stretch = [known + more for known, more in zip(self.stretch, sums, strict=True)]
        self.rows = [row for row in self.rows if row[1] < lengths[row[0]]]
        self.clock += seconds

    def tell(self, *, drafts: bool) -> DraftedSteps:
        """Return the stretch, and begin another."""
        steps, rows, keys, tokens, seconds = self.stretch
        self.stretch = [0.0] * 5
        return DraftedSteps(steps, rows / steps, keys / rows, tokens / rows, seconds, steps if drafts else 0.0)


def _accepted(tokens: int, random: np.random.Generator) -> int:
    right = random.random(DRAFT) < (0.85 if tokens > SURE else 0.6)
    return int(np.cumprod(right).sum())


def decode(
    lengths: Sequence[int], threshold: int, times: float, random: np.random.Generator | None
) -> tuple[float, list[DraftedSteps]]:
    """Return the seconds of an iteration and its stretches; at the threshold all go to the worker that holds more."""
    workers = [_MadeUpWorker([[sample, 0] for sample in range(index, len(lengths), 2)], times) for index in range(2)]
    stretches: list[DraftedSteps] = []
    while any(worker.rows for worker in workers):
        worker = min((each for each in workers if each.rows), key=lambda each: each.clock)
        worker.step(lengths, random)
        if worker.stretch[-1] >= STRETCH_SECONDS or not worker.rows:
            stretches.append(worker.tell(drafts=random is not None))
        if all(each.rows for each in workers) and sum(len(each.rows) for each in workers) <= threshold:
            stays, goes = sorted(workers, key=lambda each: -len(each.rows))
            stays.rows, goes.rows = stays.rows + goes.rows, []
            stays.clock = max(stays.clock, goes.clock)
    return max(worker.clock for worker in workers), stretches


def errors(case: str, iterations: int, times: float = 1.0, seed: int = 1) -> Errors:
    """Return how far off the predictions of a case are."""
    drafts, threshold = CASES[case]
    random, answer = np.random.default_rng(seed), Errors([], [])
    setup, known = IterationSetup(2, 0, [PROMPT] * SAMPLES), costs(times)
    model, pool = LengthModel.prior(LIMIT), 1 if threshold else 2

    def predicted(lengths: Ints) -> float:
        return simulate(lengths, setup, known, threshold, pool, model=model).generation_seconds

    def plain_seconds(rows: float, context: float) -> float:
        return times * step_seconds(rows, rows * context)

    for iteration in range(iterations):
        lengths = draw_lengths(random)
        seconds, stretches = decode(lengths.tolist(), threshold, times, random if drafts else None)
        if iteration >= WARM_UP:
            draws = np.random.default_rng((seed, iteration))
            drawn = [predicted(model.draw(draws, setup.prompts)) for _ in range(DRAWS)]
            answer.lengths_known.append(predicted(lengths) / seconds - 1)
            answer.lengths_drawn.append(float(np.mean(drawn)) / seconds - 1)
        model = model.with_batch((PROMPT, int(length)) for length in lengths)
        if drafts:
            forecast = observed_forecast(known.speculation, stretches, plain_seconds, zero_allowed=False)
            known = replace(known, speculation=forecast)
    return answer


def summary(found: Sequence[float]) -> dict[str, float]:
    """Return the median of the error without its sign, and the 10th and 90th percentile of the error."""
    low, high = np.quantile(found, (0.1, 0.9)).tolist()
    return {"median": round(float(np.median(np.abs(found))), 4), "p10": round(low, 4), "p90": round(high, 4)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--times", type=float, default=1.0, help="as long for everything, above 0")
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    arguments = parser.parse_args()
    if arguments.iterations <= WARM_UP:
        parser.error(f"--iterations is {arguments.iterations}, must be more than {WARM_UP}, which are not counted")
    if not 0 < arguments.times < float("inf"):
        parser.error(f"--times is {arguments.times}, must be finite and above 0")
    rows = {}
    for case in CASES:
        found = errors(case, arguments.iterations, arguments.times)
        rows[case] = {name: summary(values) for name, values in found._asdict().items()}
        print(f"{case:>8}: {rows[case]}")
    if arguments.json:
        print(json.dumps({"iterations": arguments.iterations, "times": arguments.times, "cases": rows}))


if __name__ == "__main__":
    main()
