"""Metrics of one job from its coordinator: iterations, phases, use of time and GPUs.

Rule: no label names the job; the scrape adds it. Counters start again with the coordinator's process.
"""

from typing import Final

from rlhf_common.metrics import buckets, labels
from rlhf_common.metrics.metric import Unit, coordinator_counter, coordinator_gauge, coordinator_histogram

# ---------------------------------------------------------------- iterations and phases

ITERATION: Final = coordinator_gauge(
    "rlhf_iteration",
    unit=Unit.NUMBER,
    meaning="Iteration in progress, from 0.",
    source="the ledger",
    normal="rises until rlhf_iterations - 1",
)
ITERATIONS: Final = coordinator_gauge(
    "rlhf_iterations",
    unit=Unit.NUMBER,
    meaning="Iterations that the job is to train.",
    source="spec.iterations",
    normal="constant, or as the user changes it",
)
STARTED: Final = coordinator_gauge(
    "rlhf_started_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="When the job's first coordinator started.",
    source="the journal",
    normal="constant",
)
ITERATION_SECONDS: Final = coordinator_histogram(
    "rlhf_iteration_seconds",
    unit=Unit.SECONDS,
    meaning="Time of a whole iteration.",
    source="seconds/iteration of every finished iteration; exemplars name the iteration",
    normal="steady; longer as responses get longer",
    buckets=buckets.ITERATION_SECONDS,
)
PHASE: Final = coordinator_gauge(
    "rlhf_phase",
    unit=Unit.STATE,
    meaning="1 for the phase the coordinator is in, 0 for the others.",
    source="the scheduler",
    normal="Generating, Scoring, Training and Publishing in turn",
    labels=(labels.PHASE,),
)
PHASE_SINCE: Final = coordinator_gauge(
    "rlhf_phase_since_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="When the coordinator entered the phase it is in.",
    source="the loop",
    normal="at most an iteration ago",
)
PHASE_SECONDS: Final = coordinator_counter(
    "rlhf_phase_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time spent by phase, the one in progress included.",
    source="the loop, since the coordinator started",
    normal="most of it in Generating",
    labels=(labels.PHASE,),
    absent="the coordinator was never in this phase",
)
LAST_PROGRESS: Final = coordinator_gauge(
    "rlhf_last_progress_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="When a token, a score, a finished optimizer batch, a loaded version or a checkpoint last came in.",
    source="results of workers; the coordinator's start before there was any",
    normal="seconds ago; minutes in a long optimizer batch",
)
RECOVERIES: Final = coordinator_counter(
    "rlhf_recoveries_total",
    unit=Unit.NUMBER,
    meaning="Times the job entered the phase Recovering.",
    source="the loop, since the coordinator started",
    normal="0, and one for each lost training rank",
)
COORDINATOR_EPOCH: Final = coordinator_gauge(
    "rlhf_coordinator_epoch",
    unit=Unit.NUMBER,
    meaning="Starts of the job's coordinator.",
    source="the journal",
    normal="1, and one more for each restart",
)

# ---------------------------------------------------------------- where time and GPUs go

STAGE_LAST: Final = coordinator_gauge(
    "rlhf_iteration_stage_seconds",
    unit=Unit.SECONDS,
    meaning="Where the time of the last finished iteration went; the stages add up to rlhf_iteration_last_seconds.",
    source="its phases: Generating, Scoring (inference), Training, Publishing (weight_update), Checkpointing; wait is "
    "Starting and Recovering; other is the rest, such as the time before a restart of the coordinator",
    normal="generation the largest, then training; wait and other near 0",
    labels=(labels.STAGE,),
    absent="no iteration is finished",
    run_metric="stage/{stage}",
)
STAGE_SECONDS: Final = coordinator_counter(
    "rlhf_stage_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time by stage of the iteration since the coordinator started, the one in progress included.",
    source="as rlhf_iteration_stage_seconds; rates of all stages add up to 1",
    normal="generation the largest, then training; wait near 0",
    labels=(labels.STAGE,),
)
GPUS: Final = coordinator_gauge(
    "rlhf_gpus",
    unit=Unit.NUMBER,
    meaning="GPUs of connected workers by group; a worker without a GPU counts as one.",
    source="gpusPerReplica of the group, at least 1, times its sessions",
    normal="constant but for resizing",
    labels=(labels.GROUP,),
)
GPU_BUSY: Final = coordinator_counter(
    "rlhf_gpu_busy_seconds_total",
    unit=Unit.SECONDS,
    meaning="GPU seconds in which workers of a group computed.",
    source="compute time in heartbeats, times GPUs of a worker; with rlhf_gpu_idle_seconds_total all that was held",
    normal="generation above 70% of its GPU seconds; training as its share of the iteration",
    labels=(labels.GROUP,),
)
GPU_IDLE: Final = coordinator_counter(
    "rlhf_gpu_idle_seconds_total",
    unit=Unit.SECONDS,
    meaning="GPU seconds in which workers of a group computed nothing, by cause.",
    source="time between heartbeats less compute time; the cause follows from the phase and the group: tail (the last "
    "samples decode elsewhere), no_work, inference, training, weight_update, checkpoint, turn (devices change hands), "
    "recovering, starting",
    normal="of generation: training, unless colocated; tail is what fusion makes small",
    labels=(labels.GROUP, labels.CAUSE),
    absent="nothing was idle for this cause",
)
WORKER_IDLE: Final = coordinator_gauge(
    "rlhf_worker_idle_share",
    unit=Unit.RATIO,
    meaning="Share of generation and inference, 0 to 1, in which a worker neither decoded nor scored.",
    source="1 - busy / elapsed, of the iteration in progress",
    normal="below 0.3 for generation workers until the tail",
    labels=(labels.WORKER,),
    absent="the worker holds no session",
)
