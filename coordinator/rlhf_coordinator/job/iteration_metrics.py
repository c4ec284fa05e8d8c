"""The metrics of an iteration, for metrics.jsonl, trackers, Prometheus, status and journal.

An infinite or NaN value is replaced by `nonfinite/<name>`, which is 1.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from rlhf_api.algorithms import Graph
from rlhf_common import reward_metrics
from rlhf_common.metrics.run import NON_FINITE
from rlhf_common.names import Group
from rlhf_common.samples import NOT_SAMPLED
from rlhf_coordinator.job.critic_overlap_metrics import critic_overlap_metrics
from rlhf_coordinator.job.iteration_stages import stage_seconds
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.plan_drift_metrics import plan_drift_metrics
from rlhf_coordinator.job.speculation_metrics import speculation_metrics
from rlhf_coordinator.job.staleness_metrics import carried_tokens, round_metrics, staleness_metrics, window_metrics
from rlhf_coordinator.job.streaming_metrics import streaming_metrics
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
CRITIC_ONLY: Final = "train/critic_only"
"""Metric of a rank: not 0 where only critics were trained."""
CRITICS_SECONDS: Final = "critic_overlap_seconds"
"""Metric of a rank: seconds of critic training, where it was separate from that of the policy."""
FUSED_PHASES: Final = ("Generating", "Scoring")
"""Phases of decoding and scoring."""


def iteration_metrics(run: JobRun, now: float) -> dict[str, float]:
    """Return the finite metrics of the iteration that ends at the moment `now`, by name (`finite_metrics`)."""
    run.times.enter(run.times.phase, now)
    metrics = {
        **batch_metrics(run.state.ledger, run.context.graph),
        **refill_metrics(run.state.ledger),
        **staleness_metrics(run),
        **round_metrics(run),
        **window_metrics(run),
        **time_metrics(run, now),
        **training_rows(run.training_metrics),
        **given_metrics(run),
        **fusion_metrics(run, now),
        **incremental_metrics(run),
        **speculation_metrics(run),
        **critic_overlap_metrics(run),
        **streaming_metrics(run),
        **plan_drift_metrics(run),
    }
    return finite_metrics(metrics)


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics, after `nonfinite/<name>` = 1 for each metric that is infinite or NaN."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {NON_FINITE + name: 1.0 for name in metrics if name not in finite} | finite


# ---------------------------------------------------------------- time


def time_metrics(run: JobRun, now: float) -> dict[str, float]:
    """Return the times of an iteration, its rates per second, and counts from its ledger."""
    ledger, times = run.state.ledger, run.times
    seconds = max(1e-9, now - times.start)
    metrics = {
        "samples_per_second": len(ledger.trainable) / seconds,
        "tokens_per_second": (ledger.tokens - carried_tokens(ledger)) / seconds,
        "seconds/iteration": seconds,
        "control_share": sum(times.control_seconds.values()) / seconds,
        "samples/returned": float(ledger.returned),
        "samples/migrated": float(ledger.migrated),
        "samples/retried": float(ledger.retried),
    }
    metrics |= {name: times.seconds.get(phase, 0.0) for phase, name in PHASE_METRICS.items()}
    metrics |= {f"stage/{stage}": spent for stage, spent in stage_seconds(times.seconds, seconds).items()}
    metrics["seconds/generation_and_inference"] = metrics["seconds/generation"] + metrics["seconds/inference"]
    if times.turn_seconds:
        metrics["seconds/turns"] = max(times.turn_seconds.values())
    return metrics


def idle_share(run: JobRun, worker: str, now: float) -> float:
    """Return the share, 0..1, of Generating and Scoring so far in which a worker neither decoded nor scored.

    Work in progress counts as idle until it is reported.
    """
    elapsed = sum(run.times.spent(phase, now) for phase in FUSED_PHASES)
    busy = sum(run.state.fusion.busy.get(worker, {}).values())
    return min(1.0, max(0.0, 1 - busy / elapsed)) if elapsed else 0.0


# ---------------------------------------------------------------- samples


def batch_metrics(ledger: Ledger, graph: Graph) -> dict[str, float]:
    """Return counts of samples, reward statistics, response lengths in tokens, and divergence from the reference."""
    lengths = np.array([len(sample.response) for sample in ledger.trainable if not sample.failed], dtype=np.float64)
    tokens = sum(len(sample.response) for sample in ledger.uncut_samples if not sample.failed)
    metrics = {
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": float(lengths.max()),
        "tokens": float(tokens),
        "samples/failed": float(sum(sample.failed for sample in ledger.samples)),
        "samples/abstained": float(sum(sample.abstained for sample in ledger.trainable)),
        "samples/truncated": float(sum(sample.finish_reason == "length" for sample in ledger.trainable)),
        "samples/cut": float(len(ledger.samples) - len(ledger.uncut_samples)),
        "tokens_cut": float(ledger.tokens - tokens),
    }
    return metrics | reward_statistics(ledger, graph) | rewards_by_name(ledger, graph) | divergence(ledger, graph)


def reward_statistics(ledger: Ledger, graph: Graph) -> dict[str, float]:
    """Return mean and deviation of each reward and cost, and the range of the first; empty without samples.

    They cover the trainable samples that have every reward and cost.
    """
    fields = graph.reward_fields
    judged = [sample for sample in ledger.trainable if all(field in sample.fields for field in fields)]
    if not fields or not judged:
        return {}
    values = {field: np.array([_scalar(sample.fields[field]) for sample in judged]) for field in fields}
    first = values[fields[0]]
    metrics = {"reward_min": float(first.min()), "reward_max": float(first.max())}
    for name, numbers in zip(("reward", *map(str, fields[1:])), values.values(), strict=True):
        metrics |= {name: float(numbers.mean()), f"{name}_std": float(numbers.std())}
    return metrics


def rewards_by_name(ledger: Ledger, graph: Graph) -> dict[str, float]:
    """Return mean, deviation, range and abstentions of each of several rewards, and means of extra values."""
    metrics: dict[str, float] = {}
    for task in graph.tasks:
        path = f"rewards/{task.part.name if task.part else task.name}"
        if not task.rewards:
            continue
        if task.part:
            (field,) = task.produces
            values = np.array([_scalar(sample.fields[field]) for sample in ledger.trainable if field in sample.fields])
            judged = sum(not sample.failed for sample in ledger.trainable)
            metrics[f"{path}/abstained"] = float(judged - values.size)
            if values.size:
                metrics |= {f"{path}/mean": float(values.mean()), f"{path}/std": float(values.std())}
                metrics |= {f"{path}/min": float(values.min()), f"{path}/max": float(values.max())}
        sample_metrics = [sample.reward_metrics.get(task.name, {}) for sample in ledger.trainable]
        for name in sorted({name for each in sample_metrics for name in each})[: reward_metrics.MAX_METRICS]:
            metrics[f"{path}/metrics/{name}"] = statistics.fmean(each[name] for each in sample_metrics if name in each)
    return metrics


def refill_metrics(ledger: Ledger) -> dict[str, float]:
    """Return the numbers of dropped, replacement and missing groups, and of rounds; empty where the job allows no
    refill rounds."""
    refill = ledger.refill
    if not refill.rule.rounds:
        return {}
    return {
        "groups/dropped": float(len(refill.dropped)),
        "groups/refilled": float(refill.groups - refill.first),
        "groups/rounds": float(refill.rounds),
        "groups/missing": float(refill.missing),
    }


def divergence(ledger: Ledger, graph: Graph) -> dict[str, float]:
    """Return the divergence from the first compared policy, in nats; empty without any.

    `kl` is log p - log q summed over a response, averaged over responses; `kl_per_token` is its mean over tokens.
    """
    if not graph.generates:
        return {}
    pairs = [
        (sample.response.log_probabilities, sample.fields[field])
        for field in graph.compared_fields[:1]
        for sample in ledger.trainable
        if field in sample.fields and not sample.abstained
    ]
    if not pairs:
        return {}
    policy, reference = (np.frombuffer(b"".join(side), dtype="<f4") for side in zip(*pairs, strict=True))
    sampled = policy != NOT_SAMPLED
    difference = policy[sampled].astype(np.float64) - reference[sampled]
    return {"kl": float(difference.sum()) / len(pairs), "kl_per_token": float(difference.mean())}


def _scalar(value: bytes) -> float:
    return float(np.frombuffer(value, dtype="<f4")[0])


def given_metrics(run: JobRun) -> dict[str, float]:
    """Return metrics of the prompts and the trackers, and the policy's loss where the job generates nothing."""
    metrics, graph = {}, run.context.graph
    prompts = run.context.spec.prompts
    if run.context.spec.trackers.named:
        metrics["trackers/lost"] = float(len(run.trackers.lost))
    if prompts.overlong == "Filter":
        metrics["prompts/filtered"] = float(sum(run.prompts.filtered))
    if prompts.sources:
        passes = zip(prompts.sources, run.prompts.passes(run.state.iteration), strict=True)
        metrics |= {f"prompts/{source.name}/passes": count for source, count in passes}
    loss = None if graph.generates else run.training_metrics.get(f"{graph.policy}/loss")
    return metrics if loss is None else metrics | {"loss": loss}


# ---------------------------------------------------------------- training


def training_rows(training: Mapping[str, float]) -> dict[str, float]:
    """Return the training metrics of an iteration by their public names, and the total of skipped steps, if known."""
    rows = {f"training/{name}": value for name, value in training.items()}
    if (skipped := training.get("train/nonfinite_steps_total")) is not None:
        rows["nonfinite_steps"] = skipped
    return rows


def training_metrics(run: JobRun, iteration: int) -> dict[str, float]:
    """Return the ranks' measurements of an iteration's training, the index of the schedule in METHODS, and its
    prediction for a step, if it applies."""
    schedule = run.state.schedule
    metrics = _merged(run.state.fleet.ranks(), iteration)
    metrics["schedule"] = float(METHODS.index(schedule.method))
    apart = metrics.get(CRITIC_ONLY) or CRITICS_SECONDS in metrics
    if schedule.predicted and not apart:  # the prediction is of a step of all models together
        metrics["predicted_step_seconds"] = schedule.predicted
    return metrics


def _merged(ranks: Iterable[Worker], iteration: int) -> dict[str, float]:
    """Merge the training metrics that the ranks reported for an iteration."""
    reported = [
        rank.last_train.metrics
        for rank in ranks
        if rank.last_train is not None and rank.last_train.iteration == iteration
    ]
    metrics: dict[str, float] = {}
    for of_rank in reversed(reported):
        metrics.update(of_rank)
    if all("bubble_share" in of_rank for of_rank in reported) and reported:
        metrics["bubble_share"] = statistics.fmean(of_rank["bubble_share"] for of_rank in reported)
    if "bubble_seconds" in metrics:
        metrics["bubble_seconds"] = sum(of_rank["bubble_seconds"] for of_rank in reported) / len(reported)
        metrics["step_seconds"] = max(of_rank["step_seconds"] for of_rank in reported)
    return metrics


def skipped_steps(training: Mapping[str, float], iteration: int) -> str:
    """Return a warning about an iteration whose training skipped steps; empty when it skipped none."""
    count = round(training.get("train/nonfinite_steps", 0.0))
    if not count:
        return ""
    steps = "1 optimizer step was" if count == 1 else f"{count} optimizer steps were"
    total = round(training.get("train/nonfinite_steps_total", count))
    return (
        f"iteration {iteration}: {steps} skipped, because a loss or gradient was infinite or NaN; {total} so far "
        "in this job"
    )


# ---------------------------------------------------------------- fusion


def fusion_metrics(run: JobRun, now: float) -> dict[str, float]:
    """Return the metrics of inter-stage fusion: the learned values, the idle shares of the groups, and its actions."""
    state, fusion, moved = run.state, run.state.fusion, run.state.fusion.moved
    metrics = dict(fusion.learned or {})
    for group in (Group.GENERATION, Group.INFERENCE):
        shares = [idle_share(run, worker.name, now) for worker in state.fleet.in_group(group)]
        if shares:
            metrics[f"idle/{group}"] = statistics.fmean(shares)
    tail = run.scheduled.consolidation
    if not tail.possible:
        return metrics
    elapsed = max(1e-9, sum(run.times.seconds.get(phase, 0.0) for phase in FUSED_PHASES))
    control = sum(run.times.control_seconds.get(phase, 0.0) for phase in FUSED_PHASES)
    if predicted := metrics.get("fusion/predicted_seconds"):
        metrics["fusion/prediction_error"] = elapsed / predicted - 1
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
    """Return the metrics of incremental scoring; empty where the job cannot score incrementally."""
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
