"""Simulates sorted windows for lengths that prompts explain to different shares.

`python benchmarks/length_window.py [--window 5]` compares batches in order with batches of a sorted window
(`rlhf_planner.inter_stage.length_window`), for 64 prompts with 8 responses each on 16 generation workers with 64 rows,
which score too. A decode step takes 10 ms and 0.08 ms per row; training takes no time. Lengths are log-normal.
"""

import argparse
import sys

import numpy as np

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.length_window import forecast_window
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.simulated_rounds import PeriodSetup

WORKERS, ROWS, PROMPTS, RESPONSES, PROMPT_TOKENS = 16, 64, 64, 8, 256
ITERATIONS = 6
"""Iterations from which the lengths are learned."""
CASES = ((0.6, 700, 16_000), (0.3, 700, 16_000), (0.0, 700, 16_000), (0.6, 256, 2_000))
"""(share of the variance that prompts explain, median tokens, limit)."""


def costs() -> StageCosts:
    """Return the costs of decoding and scoring."""
    shapes = [(batch, keys) for batch in (1, ROWS) for keys in (512, 8192)]
    return StageCosts.measured(
        decode=[StepTime(batch, keys, 0.01 + 8e-5 * batch) for batch, keys in shapes],
        prefill=[StepTime(batch, keys, 1e-6 * batch * keys) for batch, keys in shapes],
        tasks={"reference": [StepTime(batch, keys, 2e-5 * batch * keys) for batch, keys in shapes]},
        max_batch_size=ROWS,
        kv_bytes_per_token=1e5,
        bandwidth=1e10,
    )


def lengths(share: float, median: float, limit: int) -> LengthModel:
    """Return a model of lengths of whose variance prompts explain a share."""
    generator, model = np.random.default_rng(0), LengthModel.prior(limit)
    for iteration in range(ITERATIONS):
        scores = np.sqrt(share) * generator.standard_normal((PROMPTS, 1))
        scores = scores + np.sqrt(1 - share) * generator.standard_normal((PROMPTS, RESPONSES))
        tokens = np.clip(np.rint(median * np.exp(1.1 * scores)), 1, limit).astype(int).ravel().tolist()
        lines = (np.repeat(np.arange(PROMPTS), RESPONSES) + iteration * PROMPTS).tolist()
        model = model.with_batch(((PROMPT_TOKENS, length) for length in tokens), lines=lines)
    return model


def main() -> int:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, default=5, help="iterations of a window")
    arguments = parser.parse_args()
    setup = PeriodSetup(
        IterationSetup(WORKERS, 0, [1]), PROMPTS, RESPONSES, [PROMPT_TOKENS] * PROMPTS, range(-PROMPTS, 0)
    )
    for share, median, limit in CASES:
        answer = forecast_window(lengths(share, median, limit), setup, costs(), arguments.window, seed=1)
        rates = f"{answer.in_order:.1f} samples/s in order, {answer.samples_per_second:.1f} sorted"
        print(f"share {share:.0%}, median {median}, limit {limit}: {rates} ({1 / (1 - answer.gain):.2f}x)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
