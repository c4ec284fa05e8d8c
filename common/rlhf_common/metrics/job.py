"""Metrics of one job from its coordinator: iterations, phases, use of time and GPUs.

Rule: no label names the job; the scrape adds it.
"""

from typing import Final

from rlhf_common.metrics import buckets, labels
from rlhf_common.metrics.metric import Unit, coordinator_counter, coordinator_gauge, coordinator_histogram

# ---------------------------------------------------------------- iterations and phases

ITERATION: Final = coordinator_gauge(
    "rlhf_iteration",
    unit=Unit.NUMBER,
    meaning="Number of the iteration in progress, from 0.",
    source="the ledger",
    normal="rises up to rlhf_iterations - 1",
)
ITERATIONS: Final = coordinator_gauge(
    "rlhf_iterations",
    unit=Unit.NUMBER,
    meaning="Number of iterations that the job should train.",
    source="spec.iterations",
    normal="constant, unless the user changes it",
)
STARTED: Final = coordinator_gauge(
    "rlhf_started_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="Time at which the first coordinator of the job started.",
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
    meaning="1 for the current phase of the coordinator, 0 for the others.",
    source="the scheduler",
    normal="Generating, Scoring, Training and Publishing in turn",
    labels=(labels.PHASE,),
)
PHASE_SINCE: Final = coordinator_gauge(
    "rlhf_phase_since_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="Time at which the coordinator entered its current phase.",
    source="the loop",
    normal="less than an iteration ago",
)
PHASE_SECONDS: Final = coordinator_counter(
    "rlhf_phase_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time spent by phase, including the phase in progress.",
    source="the loop, since the coordinator started",
    normal="most of the time in Generating",
    labels=(labels.PHASE,),
    absent="the coordinator was never in this phase",
)
LAST_PROGRESS: Final = coordinator_gauge(
    "rlhf_last_progress_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="Time at which the coordinator last received a token, a score, a finished optimizer batch, a loaded "
    "version or a checkpoint.",
    source="results of workers; before the first result, the start of the coordinator",
    normal="seconds ago; minutes ago during a long optimizer batch",
)
RECOVERIES: Final = coordinator_counter(
    "rlhf_recoveries_total",
    unit=Unit.NUMBER,
    meaning="Number of times that the job entered the phase Recovering.",
    source="the loop, since the coordinator started",
    normal="0, or one for each lost training rank",
)
COORDINATOR_EPOCH: Final = coordinator_gauge(
    "rlhf_coordinator_epoch",
    unit=Unit.NUMBER,
    meaning="Number of starts of the job's coordinator.",
    source="the journal",
    normal="1, plus one for each restart",
)

# ---------------------------------------------------------------- where time and GPUs go

STAGE_LAST: Final = coordinator_gauge(
    "rlhf_iteration_stage_seconds",
    unit=Unit.SECONDS,
    meaning="Time of the last finished iteration by stage. The stages add up to rlhf_iteration_last_seconds.",
    source="its phases: Generating, Scoring (inference), Training, Publishing (weight_update), Checkpointing; wait is "
    "Starting and Recovering; other is the rest, such as the time before a restart of the coordinator",
    normal="generation is the largest, then training; wait and other are near 0",
    labels=(labels.STAGE,),
    absent="no iteration is finished",
    run_metric="stage/{stage}",
)
STAGE_SECONDS: Final = coordinator_counter(
    "rlhf_stage_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time by stage since the coordinator started, including the iteration in progress.",
    source="the stages of rlhf_iteration_stage_seconds; the rates of all stages add up to 1",
    normal="generation is the largest, then training; wait is near 0",
    labels=(labels.STAGE,),
)
GPUS: Final = coordinator_gauge(
    "rlhf_gpus",
    unit=Unit.NUMBER,
    meaning="Number of GPUs of connected workers, by group. A worker without a GPU counts as one.",
    source="gpusPerReplica of the group, at least 1, times its sessions",
    normal="constant between resizes",
    labels=(labels.GROUP,),
)
GPU_BUSY: Final = coordinator_counter(
    "rlhf_gpu_busy_seconds_total",
    unit=Unit.SECONDS,
    meaning="GPU seconds in which workers of a group computed. A worker without a GPU counts as one.",
    source="compute time in heartbeats, times the GPUs of a worker; together with rlhf_gpu_idle_seconds_total "
    "the time of all GPUs of connected workers",
    normal="generation above 70% of its GPU seconds; training as large as its share of the iteration",
    labels=(labels.GROUP,),
)
GPU_IDLE: Final = coordinator_counter(
    "rlhf_gpu_idle_seconds_total",
    unit=Unit.SECONDS,
    meaning="GPU seconds in which workers of a group computed nothing, by cause. A worker without a GPU counts as one.",
    source="time between heartbeats minus compute time; the cause follows from phase and group: tail (other "
    "workers decode the last samples), no_work, inference, training, weight_update, checkpoint, turn "
    "(roles change on a device), recovering, starting",
    normal="for generation, the cause training is the largest unless the job is colocated; fusion reduces the "
    "cause tail",
    labels=(labels.GROUP, labels.CAUSE),
    absent="no GPU was idle for this cause",
)
WORKER_IDLE: Final = coordinator_gauge(
    "rlhf_worker_idle_share",
    unit=Unit.RATIO,
    meaning="Share of generation and inference, 0 to 1, in which a worker neither decoded nor scored.",
    source="1 - busy / elapsed time of the iteration in progress",
    normal="below 0.3 for generation workers until the tail",
    labels=(labels.WORKER,),
    absent="the worker has no session",
)
