"""What it would give to lease samples longest first: generation simulated by the planner, samples in other orders.

    python benchmarks/submission_order.py --json

Each prompt has several responses, whose log-lengths are the prompt's own mean plus randomness; `share` is how much of
the variance is between prompts. Orders: `given` (what dispatch does), `expected` (longest mean of the same prompts'
responses in an earlier iteration first, all that a job can know), `known` (the lengths themselves, a bound that nobody
reaches). `batches` says how many samples there are for each that workers can hold: below 1 none waits, and an order can
only spread them. Reported: the median over seeds of how many times faster than `given` generation is, and its 10th
percentile. The last line of --json is one object.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import DecodeLines, StepTime
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.length_distribution import Floats, Ints
from rlhf_planner.inter_stage.simulated_generation import generate

WORKERS, ROWS, GROUP, LIMIT, PROMPT = 4, 32, 8, 4096, 256
DEVIATION = 0.9
"""Of log-lengths: the longest of a few hundred is ten times the median."""
STEP_SECONDS = [StepTime(1, 512, 0.020), StepTime(32, 512, 0.026), StepTime(1, 4096, 0.021), StepTime(32, 4096, 0.040)]
"""An 8B model on one GPU, about: weights are read whatever the batch is, keys and values for each row."""


def drawn(random: np.random.Generator, prompts: int, share: float) -> tuple[Ints, Floats]:
    """Lengths of this iteration, prompt after prompt, and each prompt's mean of an earlier one, for every response."""
    effect = np.repeat(random.standard_normal(prompts), GROUP) * np.sqrt(share)
    now, before = (effect + np.sqrt(1 - share) * random.standard_normal(prompts * GROUP) for _ in range(2))
    lengths = [np.clip(np.exp(np.log(400) + DEVIATION * score), 1, LIMIT).astype(np.int64) for score in (now, before)]
    means = lengths[1].reshape(prompts, GROUP).mean(axis=1)
    return lengths[0], np.repeat(means, GROUP)


def seconds(lengths: Ints, costs: StageCosts) -> float:
    """Time of generation with samples leased in this order."""
    return generate(lengths, IterationSetup(WORKERS, 0, [PROMPT] * len(lengths)), costs).end


def compare(batches: float, share: float, seeds: int, costs: StageCosts) -> dict[str, Any]:
    """Times faster than the given order."""
    gains: dict[str, list[float]] = {"expected": [], "known": []}
    prompts = max(1, round(batches * WORKERS * ROWS / GROUP))
    for seed in range(seeds):
        lengths, means = drawn(np.random.default_rng(seed), prompts, share)
        given = seconds(lengths, costs)
        for order, keys in (("expected", means), ("known", lengths)):
            gains[order].append(given / seconds(lengths[np.argsort(-keys, kind="stable")], costs))
    return {
        "batches": batches,
        "share": share,
        **{order: round(statistics.median(values), 3) for order, values in gains.items()},
        **{f"{order}_tenth": round(float(np.quantile(values, 0.1)), 3) for order, values in gains.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    costs = StageCosts(DecodeLines.fitted(STEP_SECONDS), ROWS)
    figures = []
    for batches in (0.5, 1.0, 2.0, 4.0):
        for share in (0.0, 0.3, 0.6):
            figures.append(compare(batches, share, arguments.seeds, costs))
            print(figures[-1], flush=True)
    if arguments.json:
        print(json.dumps({"workers": WORKERS, "rows": ROWS, "seeds": arguments.seeds, "figures": figures}))


if __name__ == "__main__":
    main()
