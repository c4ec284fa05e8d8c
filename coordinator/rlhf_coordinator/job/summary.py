"""The facts of a finished job, for the summaries of trackers."""

import math
import time
from typing import Any

from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.state.evaluation_state import best
from rlhf_coordinator.storage.restore import mean


def summary(run: JobRun, samples_per_prompt: int) -> dict[str, Any]:
    """Return facts about the whole job, over all coordinators of its journal.

    `reward_first` and `reward_last` are means of the first and last tenth of the iterations (at least one).
    """
    assert run.outcome is not None
    rewards = run.rewards
    seconds = max(1e-9, (time.time_ns() - run.started_ns) / 1e9)
    tenth = max(1, len(rewards) // 10)
    facts: dict[str, Any] = {
        "job": run.context.job.name,
        "algorithm": run.context.graph.algorithm,
        "phase": run.outcome.phase,
        "iterations": len(rewards),
        "iteration": run.state.version,
        "samples": len(rewards) * run.context.spec.rollout.batch_size,
        "samples_per_prompt": samples_per_prompt,
        "samples_per_second": len(rewards) * run.context.spec.rollout.batch_size / seconds,
        "seconds": seconds,
        "nonfinite_steps": round(run.last_metrics.get("nonfinite_steps", 0.0)),
        "weight_version": run.state.version,
        "checkpoint": run.state.checkpoint.folder,
        "coordinator_starts": run.coordinator_epoch,
        "rewards": [value if math.isfinite(value) else None for value in rewards],
        "reward_first": mean(rewards[:tenth]),
        "reward_last": mean(rewards[-tenth:]),
    }
    for name, metric in (
        ("tokens_per_step", "speculation/tokens_per_step"),
        ("acceptance", "speculation/acceptance"),
        ("loss", "loss"),
    ):
        if metric in run.last_metrics:
            facts[name] = run.last_metrics[metric]
    if run.context.spec.rollout.long_rounds != "Disabled":
        facts["prompts_waiting"] = round(run.last_metrics.get("prompts/waiting", 0.0))
    if run.state.evaluation.results:
        facts["evaluation"] = evaluation_facts(run)
    failure = run.outcome.failure
    if failure is not None:
        facts["failure"] = {"reason": failure.reason, "field": failure.field, "message": failure.message}
    return facts


def evaluation_facts(run: JobRun) -> dict[str, Any]:
    """Return every evaluation of the run, the best of them, and the folder of the best evaluated checkpoint."""
    results, top = run.state.evaluation.results, best(run.state.evaluation.results)
    return {
        "results": [dict(result.metrics) for result in results],
        "best_version": None if top is None else top.version,
        "best_reward": None if top is None else top.metrics["reward"],
        "best_checkpoint": run.state.checkpoint.best,
    }
