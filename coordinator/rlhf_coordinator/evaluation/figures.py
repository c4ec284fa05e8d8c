"""The result of an evaluation as numbers. Rule: pure.

A response without a finite reward counts as a sample, but is in no mean of rewards.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import Sample

LARGEST_TABLE: Final = 9
"""Maximum number of powers of two among the values of k in pass@k: 1, 2, 4, ... up to 256."""


def pass_at(judged: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k (arXiv 2107.03374).

    `passed` of `judged` responses pass; `k` is 1 to `judged`.
    """
    return 1.0 - math.comb(judged - passed, k) / math.comb(judged, k)


def evaluation_metrics(ledger: Ledger, per_prompt: int, pass_reward: float, field: str) -> dict[str, float]:
    """Return the metrics of a complete evaluation; each run of `per_prompt` samples belongs to one prompt.

    `reward` is the mean over responses, `reward_best` the mean over prompts of the best response.
    """
    groups = [ledger.samples[start : start + per_prompt] for start in range(0, len(ledger.samples), per_prompt)]
    rewards = [[value for sample in group if (value := _reward(sample, field)) is not None] for group in groups]
    everything = np.array([value for group in rewards for value in group], dtype=np.float64)
    decoded = [sample for sample in ledger.samples if not sample.failed]
    metrics = {
        "version": float(ledger.iteration),
        "prompts": float(len(groups)),
        "samples": float(len(ledger.samples)),
        "failed": float(len(ledger.samples) - len(decoded)),
        "abstained": float(sum(sample.abstained for sample in ledger.samples)),
    }
    if decoded:
        metrics["response_tokens_mean"] = float(np.mean([len(sample.response) for sample in decoded]))
        metrics["truncated_share"] = float(np.mean([sample.finish_reason == "length" for sample in decoded]))
    if not everything.size:
        return metrics
    metrics |= {"reward": float(everything.mean()), "reward_std": float(everything.std())}
    if per_prompt > 1:
        metrics["reward_best"] = float(np.mean([max(group) for group in rewards if group]))
    for k in _table(per_prompt):
        shares = [
            pass_at(len(group), sum(value >= pass_reward for value in group), k) for group in rewards if len(group) >= k
        ]
        if shares:
            metrics[f"pass_at_{k}"] = float(np.mean(shares))
    return metrics


def _table(per_prompt: int) -> Sequence[int]:
    """Return the first LARGEST_TABLE powers of two up to the number of responses, and this number itself, sorted."""
    powers = [2**power for power in range(LARGEST_TABLE) if 2**power <= per_prompt]
    return sorted({*powers, per_prompt})


def _reward(sample: Sample, field: str) -> float | None:
    if field not in sample.fields:
        return None
    value = float(np.frombuffer(sample.fields[field], dtype="<f4")[0])
    return value if math.isfinite(value) else None
