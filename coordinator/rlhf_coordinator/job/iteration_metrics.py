"""The metrics of an iteration: all that is computed of it for metrics.jsonl, trackers, Prometheus, status and journal.

Owns every name in them but those of what was predicted and learned, which `fusion.learning` computes while it learns. A
mechanism keeps its counts in the state; the numbers that people see are made of them here.
Rule: read only; every sum is in sample order. A value that is not finite, and a reward that nobody gave, is absent and
never zero.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from rlhf_api.algorithms import Graph
from rlhf_api.names import Group
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling import incremental_dispatch
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.worker import Worker
from rlhf_planner.schedule.methods import METHODS

PHASE_METRICS: Final = {
    "Generating": "seconds/generation",
    "Scoring": "seconds/inference",
    "Training": "seconds/training",
    "Publishing": "seconds/publish",
    "Checkpointing": "seconds/checkpoint",
    "Recovering": "seconds/recovery",
}
FUSED_PHASES: Final = ("Generating", "Scoring")
"""What inter-stage fusion makes shorter, and is to add little to."""


def iteration_metrics(run: JobRun, now: float) -> dict[str, float]:
    """Return the metrics of the iteration that ends at the moment `now`, by name."""
    run.times.enter(run.times.phase, now)
    metrics = {
        **batch_metrics(run.state.ledger, run.context.graph),
        **time_metrics(run, now),
        **{f"training/{name}": value for name, value in run.training_metrics.items()},
        **fusion_metrics(run),
        **incremental_metrics(run),
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


# ---------------------------------------------------------------- time


def time_metrics(run: JobRun, now: float) -> dict[str, float]:
    """Return seconds by phase, rates per second, and how samples changed hands meanwhile."""
    ledger, times = run.state.ledger, run.times
    seconds = max(1e-9, now - times.start)
    metrics = {
        "samples_per_second": len(ledger.samples) / seconds,
        "tokens_per_second": ledger.tokens / seconds,
        "seconds/iteration": seconds,
        "control_share": sum(times.control_seconds.values()) / seconds,
        "samples/returned": float(ledger.returned),
        "samples/migrated": float(ledger.migrated),
        "samples/retried": float(ledger.retried),
    }
    metrics |= {name: times.seconds.get(phase, 0.0) for phase, name in PHASE_METRICS.items()}
    metrics["seconds/generation_and_inference"] = metrics["seconds/generation"] + metrics["seconds/inference"]
    if times.turn_seconds:
        metrics["seconds/turns"] = max(times.turn_seconds.values())
    if (skipped := run.training_metrics.get("train/nonfinite_steps_total")) is not None:
        metrics["nonfinite_steps"] = skipped
    return metrics


def idle_share(run: JobRun, worker: str) -> float:
    """Return the share, 0..1, of generation and inference so far in which a worker neither decoded nor scored."""
    elapsed = sum(run.times.seconds.get(phase, 0.0) for phase in FUSED_PHASES)
    busy = sum(run.state.fusion.busy.get(worker, {}).values())
    return min(1.0, max(0.0, 1 - busy / elapsed)) if elapsed else 0.0


# ---------------------------------------------------------------- samples


def batch_metrics(ledger: Ledger, graph: Graph) -> dict[str, float]:
    """Return mean and deviation of the reward over the samples that have one, response lengths in tokens, and the
    divergence from the reference."""
    field = graph.reward_fields[0]
    rewards = np.array([_scalar(sample.fields[field]) for sample in ledger.samples if field in sample.fields])
    lengths = np.array([len(sample.response) for sample in ledger.samples], dtype=np.float64)
    metrics = {
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": float(lengths.max()),
        "tokens": float(lengths.sum()),
        "samples/abstained": float(sum(sample.abstained for sample in ledger.samples)),
        "samples/truncated": float(sum(sample.finish_reason == "length" for sample in ledger.samples)),
    }
    if rewards.size:
        metrics |= {"reward": float(rewards.mean()), "reward_std": float(rewards.std())}
    return metrics | divergence(ledger, graph)


def divergence(ledger: Ledger, graph: Graph) -> dict[str, float]:
    """Return `kl`, log p - log q summed over a response, mean over responses, in nats, which klTarget is compared with;
    and `kl_per_token`, its mean over tokens. An abstained sample is not trained on and has none; empty without any."""
    pairs = [
        (sample.response.log_probabilities, sample.fields[field])
        for field in graph.compared_fields[:1]
        for sample in ledger.samples
        if field in sample.fields and not sample.abstained
    ]
    if not pairs:
        return {}
    policy, reference = (np.frombuffer(b"".join(side), dtype="<f4") for side in zip(*pairs, strict=True))
    total = float((policy.astype(np.float64) - reference.astype(np.float64)).sum())
    return {"kl": total / len(pairs), "kl_per_token": total / len(policy)}


def _scalar(value: bytes) -> float:
    return float(np.frombuffer(value, dtype="<f4")[0])


# ---------------------------------------------------------------- training


def training_metrics(run: JobRun) -> dict[str, float]:
    """Return what the ranks measured of their training, and the schedule they trained by, as its place in METHODS."""
    schedule = run.state.schedule
    metrics = _merged(run.state.fleet.ranks(), run.state.iteration)
    metrics["schedule"] = float(METHODS.index(schedule.method))
    if schedule.predicted:
        metrics["predicted_step_seconds"] = schedule.predicted
    return metrics


def _merged(ranks: Iterable[Worker], iteration: int) -> dict[str, float]:
    """The metrics of an iteration's training. All ranks report the same but for their times: of those, bubbles are the
    mean, mini-batches the slowest rank's, the others the first rank's."""
    reported = [
        rank.last_train.metrics
        for rank in ranks
        if rank.last_train is not None and rank.last_train.iteration == iteration
    ]
    metrics: dict[str, float] = {}
    for of_rank in reversed(reported):
        metrics.update(of_rank)
    if "bubble_seconds" in metrics:
        metrics["bubble_seconds"] = sum(of_rank["bubble_seconds"] for of_rank in reported) / len(reported)
        metrics["step_seconds"] = max(of_rank["step_seconds"] for of_rank in reported)
    return metrics


def skipped_steps(training: Mapping[str, float], iteration: int) -> str:
    """Return what to say of an iteration whose training left out steps; empty when it left out none."""
    count = round(training.get("train/nonfinite_steps", 0.0))
    if not count:
        return ""
    steps = "1 optimizer step was" if count == 1 else f"{count} optimizer steps were"
    total = round(training.get("train/nonfinite_steps_total", count))
    return (
        f"iteration {iteration + 1}: {steps} skipped, because a loss or gradient was infinite or NaN; {total} so far "
        "in this job"
    )


# ---------------------------------------------------------------- fusion


def fusion_metrics(run: JobRun) -> dict[str, float]:
    """Return what inter-stage fusion did, what was learned from the iteration, and how idle the groups were."""
    state, fusion, moved = run.state, run.state.fusion, run.state.fusion.moved
    metrics = dict(fusion.learned or {})
    for group in (Group.GENERATION, Group.INFERENCE):
        shares = [idle_share(run, worker.name) for worker in state.fleet.of(group)]
        if shares:
            metrics[f"idle/{group}"] = statistics.fmean(shares)
    tail = run.scheduled.consolidation
    if not tail.possible:
        return metrics
    elapsed = max(1e-9, sum(run.times.seconds.get(phase, 0.0) for phase in FUSED_PHASES))
    control = sum(run.times.control_seconds.get(phase, 0.0) for phase in FUSED_PHASES)
    return metrics | {
        "fusion/threshold": float(fusion.choice.threshold if tail.planned else 0),
        "fusion/pool": float(fusion.choice.pool if tail.planned else state.fleet.sizes[Group.GENERATION]),
        "fusion/decode_busy": sum(busy.get("decode", 0.0) for busy in fusion.busy.values()),
        "fusion/score_busy": sum(busy.get("score", 0.0) for busy in fusion.busy.values()),
        "fusion/moved_kv": float(moved.kv),
        "fusion/moved_tokens": float(moved.tokens),
        "fusion/stayed": float(moved.stayed),
        "fusion/moved_bytes": float(moved.bytes),
        "fusion/migration_seconds": moved.seconds,
        "fusion/paused_seconds": moved.paused,
        "fusion/overhead_share": (control + moved.longest_pause) / elapsed,
    }


def incremental_metrics(run: JobRun) -> dict[str, float]:
    """Return what incremental scoring did; empty where the job cannot score incrementally."""
    counts = run.state.incremental
    if not incremental_dispatch.is_possible(run.context):
        return {}
    gain = counts.predicted
    predicted = {} if gain is None else {"incremental/predicted_gain_seconds": gain}
    return predicted | {
        "incremental/on": float(incremental_dispatch.is_enabled(run.context, run.state)),
        "incremental/early_share": counts.early_tokens / max(1, counts.tokens),
        "incremental/dropped": float(counts.dropped),
        "incremental/cache_bytes": float(counts.max_bytes),
    }
