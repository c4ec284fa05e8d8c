"""Lengths, costs and sizes of simulated periods, for long rounds and sorted windows."""

from typing import Any

import numpy as np

from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.simulated_rounds import PeriodSetup

LIMIT = 1024
WORKERS, EACH = 2, 4


def stage_costs(score_token: float = 1e-6, rows: int = 48) -> StageCosts:
    """Return costs of a step that takes 10 ms for any batch, and of scoring with these seconds a token."""
    shapes = [(batch, keys) for batch in (1, 48) for keys in (64, 1024)]
    return StageCosts.measured(
        decode=[StepTime(batch, keys, 0.01) for batch, keys in shapes],
        prefill=[StepTime(batch, keys, 1e-6) for batch, keys in shapes],
        tasks={"reference": [StepTime(batch, keys, batch * keys * score_token) for batch, keys in shapes]},
        max_batch_size=rows,
        kv_bytes_per_token=1000.0,
        bandwidth=4e8,
    )


def period_setup(batch: int, workers: int = WORKERS, **more: Any) -> PeriodSetup:
    layout = IterationSetup(workers, 1, [1])
    return PeriodSetup(layout, batch, EACH, [16] * batch, range(10_000, 10_000 + batch), **more)


def learned(batch: int, share: float, median: float, sigma: float, limit: int = LIMIT) -> LengthModel:
    """Return a model of log-normal lengths of which prompts explain a share of the variance."""
    rng, model = np.random.default_rng(0), LengthModel.prior(limit)
    for iteration in range(6):
        scores = np.sqrt(share) * rng.standard_normal((batch, 1)) + np.sqrt(1 - share) * rng.standard_normal(
            (batch, EACH)
        )
        tokens = np.clip(np.rint(median * np.exp(sigma * scores)), 1, limit).astype(int).ravel()
        lines = (np.repeat(np.arange(batch), EACH) + iteration * batch).tolist()
        model = model.with_batch(((16, int(length)) for length in tokens), lines=lines)
    return model
