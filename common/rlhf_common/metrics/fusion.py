"""Metrics of inter-stage fusion and incremental scoring: threshold, pool, moves, predictions and measurements."""

from functools import partial
from typing import Final

from rlhf_common.metrics import buckets, labels
from rlhf_common.metrics.metric import Unit, coordinator_counter, coordinator_gauge, coordinator_histogram

_NONE: Final = "no iteration is finished, or none in which fusion was possible"
_last = partial(coordinator_gauge, absent=_NONE)

THRESHOLD: Final = coordinator_gauge(
    "rlhf_fusion_threshold",
    unit=Unit.SAMPLES,
    meaning="Number of unfinished samples at which the tail moves to the pool in this iteration; 0 without fusion.",
    source="the plan of the iteration in progress",
    normal="a tenth to a third of the batch",
)
POOL: Final = coordinator_gauge(
    "rlhf_fusion_pool",
    unit=Unit.STATE,
    meaning="1 for each worker in the migration pool.",
    source="the scheduler",
    normal="no series outside the tail of generation",
    labels=(labels.WORKER,),
    absent="the worker is not in the pool",
)
POOL_WORKERS: Final = coordinator_gauge(
    "rlhf_fusion_pool_workers",
    unit=Unit.NUMBER,
    meaning="Planned number of workers that decode the tail in this iteration; 0 without fusion.",
    source="the plan of the iteration in progress",
    normal="a quarter to a half of the generation workers",
)
RELEASED: Final = coordinator_gauge(
    "rlhf_fusion_released",
    unit=Unit.STATE,
    meaning="1 for each generation worker that scores.",
    source="the scheduler",
    normal="no series outside the tail of generation and the scoring after it",
    labels=(labels.WORKER,),
    absent="the worker does not score",
)
PREDICTED: Final = coordinator_gauge(
    "rlhf_fusion_predicted_seconds",
    unit=Unit.SECONDS,
    meaning="Predicted time of generation and inference of the iteration in progress, with and without fusion.",
    source="the plan of the iteration in progress; 0 means that there is no prediction",
    normal="the time with fusion is at most the time without",
    labels=(labels.FUSION,),
)
LAST_MEASURED: Final = _last(
    "rlhf_fusion_last_measured_seconds",
    unit=Unit.SECONDS,
    meaning="Time of generation and inference of the last finished iteration.",
    source="its phases Generating and Scoring",
    normal="near rlhf_fusion_last_predicted_seconds",
    run_metric="seconds/generation_and_inference",
)
LAST_PREDICTED: Final = _last(
    "rlhf_fusion_last_predicted_seconds",
    unit=Unit.SECONDS,
    meaning="Time of generation and inference that the coordinator predicted before the last finished iteration began.",
    source="the simulation with expected lengths",
    normal="within 25% of rlhf_fusion_last_measured_seconds",
    run_metric="fusion/predicted_seconds",
)
LAST_WITHOUT: Final = _last(
    "rlhf_fusion_last_without_seconds",
    unit=Unit.SECONDS,
    meaning="Time of generation and inference without fusion that the coordinator predicted for the last "
    "finished iteration.",
    source="the same simulation with mode Disabled",
    normal="at least rlhf_fusion_last_predicted_seconds",
    run_metric="fusion/predicted_off_seconds",
)
LAST_SIMULATED: Final = _last(
    "rlhf_fusion_last_simulated_seconds",
    unit=Unit.SECONDS,
    meaning="Simulated time of generation and inference of the last finished iteration, with its actual response "
    "lengths.",
    source="the simulation in hindsight; its difference from the measured time is an error of costs",
    normal="within 10% of rlhf_fusion_last_measured_seconds",
    run_metric="fusion/simulated_seconds",
)
LAST_SIMULATED_WITHOUT: Final = _last(
    "rlhf_fusion_last_simulated_without_seconds",
    unit=Unit.SECONDS,
    meaning="Simulated time of generation and inference of the last finished iteration without fusion, with its "
    "actual response lengths. The gain is relative to it.",
    source="the simulation with the actual lengths and mode Disabled",
    normal="at least rlhf_fusion_last_simulated_seconds",
    run_metric="fusion/simulated_off_seconds",
)
GAIN: Final = _last(
    "rlhf_fusion_gain_ratio",
    unit=Unit.RATIO,
    meaning="Share of the time of generation and inference that fusion saved in the last finished iteration, "
    "compared with Disabled.",
    source="1 - simulated with fusion / simulated without, both in hindsight with the same costs and lengths",
    normal="0.05 to 0.4 with long tails; 0 if the plan used no fusion",
    run_metric="fusion/gain_share",
)
PREDICTION_ERROR: Final = _last(
    "rlhf_fusion_prediction_error_ratio",
    unit=Unit.RATIO,
    meaning="Relative error of the predicted time of the last finished iteration.",
    source="measured / predicted - 1",
    normal="-0.25 to 0.25 after the first iterations",
    run_metric="fusion/prediction_error",
)
OVERHEAD: Final = _last(
    "rlhf_fusion_overhead_ratio",
    unit=Unit.RATIO,
    meaning="Share of the time of generation and inference that control and the longest pause of a moved sample took.",
    source="(control seconds + longest pause) / seconds of both phases",
    normal="below 0.02",
    run_metric="fusion/overhead_share",
)
COST: Final = _last(
    "rlhf_fusion_cost_ratio",
    unit=Unit.RATIO,
    meaning="Observed cost of work divided by its profiled cost, by kind of work.",
    source="learned in every iteration; contention: a decode step while another worker scores",
    normal="0.7 to 1.5, and steady",
    labels=(labels.COST,),
    run_metric="fusion/{kind}_ratio",
)
LENGTH_DRIFT: Final = _last(
    "rlhf_fusion_length_drift_ratio",
    unit=Unit.RATIO,
    meaning="Distance between the distributions of the newest response lengths and of earlier ones.",
    source="Kolmogorov-Smirnov statistic, 0 to 1",
    normal="below 0.2; above that, predictions lag behind",
    run_metric="fusion/length_drift",
)
MIGRATED: Final = coordinator_counter(
    "rlhf_migrated_samples_total",
    unit=Unit.SAMPLES,
    meaning="Samples that moved between workers, with their KV cache or with their tokens alone.",
    source="answers to moves, since the coordinator started",
    normal="at most the threshold in each iteration, mostly by kv",
    labels=(labels.MOVED_BY,),
)
MIGRATED_BYTES: Final = coordinator_counter(
    "rlhf_migrated_bytes_total",
    unit=Unit.BYTES,
    meaning="Bytes of KV cache that moved between workers.",
    source="answers to moves, since the coordinator started",
    normal="samples moved by kv, times the size of their context",
)
MIGRATION_FAILURES: Final = coordinator_counter(
    "rlhf_migration_failures_total",
    unit=Unit.SAMPLES,
    meaning="Samples that should have moved with their KV cache and stayed on their worker.",
    source="answers to moves, since the coordinator started; the event migration-failed names the reason",
    normal="a few, for samples that finish during the move; far below rlhf_migrated_samples_total",
)
MIGRATION_SECONDS: Final = coordinator_histogram(
    "rlhf_migration_seconds",
    unit=Unit.SECONDS,
    meaning="Time from the first part of a sample's KV cache to the answer of the destination.",
    source="measured by the source worker; exemplars name worker and sample",
    normal="the bytes divided by the speed of the link",
    buckets=buckets.MOVE_SECONDS,
)
MIGRATION_PAUSED: Final = coordinator_histogram(
    "rlhf_migration_paused_seconds",
    unit=Unit.SECONDS,
    meaning="Time in which neither worker decoded a sample that moved with its KV cache.",
    source="measured by the source worker; exemplars name worker and sample",
    normal="the time of a step or two",
    buckets=buckets.MOVE_SECONDS,
)
EARLY: Final = _last(
    "rlhf_incremental_early_ratio",
    unit=Unit.RATIO,
    meaning="Share of reference and critic tokens that workers scored before their samples ended.",
    source="scores of the last finished iteration",
    normal="0 if incremental scoring is off; otherwise above 0.3",
    run_metric="incremental/early_share",
)
INCREMENTAL_GAIN: Final = _last(
    "rlhf_incremental_predicted_gain_seconds",
    unit=Unit.SECONDS,
    meaning="Predicted time that scoring of unfinished samples saves in an iteration.",
    source="the counterfactual of the last finished iteration, in mode Auto",
    normal="positive while incremental scoring is on",
    run_metric="incremental/predicted_gain_seconds",
)
