"""Metrics of weights, checkpoints, trackers, traces, the journal and their disks, from the coordinator."""

from typing import Final

from rlhf_common.metrics import buckets, labels
from rlhf_common.metrics.metric import (
    Metric,
    MetricKind,
    Server,
    Unit,
    coordinator_counter,
    coordinator_gauge,
    coordinator_histogram,
)

WEIGHT_VERSION: Final = coordinator_gauge(
    "rlhf_weight_version",
    unit=Unit.NUMBER,
    meaning="Current weight version of the job. Iteration i produces version i + 1.",
    source="the ledger",
    normal="rises by one in each iteration",
)
WEIGHT_UPDATE: Final = coordinator_histogram(
    "rlhf_weight_update_seconds",
    unit=Unit.SECONDS,
    meaning="Time in which a worker loaded a new weight version from the training ranks.",
    source="measured by the worker; exemplars name worker and version",
    normal="the bytes of the model divided by the speed of the link",
    labels=(labels.WEIGHT_GROUP,),
    buckets=buckets.STEP_SECONDS,
    absent="no worker of the group has loaded a version yet",
)
WEIGHT_COPY: Final = coordinator_histogram(
    "rlhf_weight_update_copy_seconds",
    unit=Unit.SECONDS,
    meaning="Time of an update in which a worker copied received weights into its model. It decodes nothing meanwhile.",
    source="measured by the worker; exemplars name worker and version",
    normal="the bytes of the model divided by the speed of the worker's memory; below rlhf_weight_update_seconds",
    labels=(labels.WEIGHT_GROUP,),
    buckets=buckets.STEP_SECONDS,
    absent="no worker of the group has loaded a version yet",
)
WEIGHT_PAUSED: Final = coordinator_histogram(
    "rlhf_weight_update_paused_seconds",
    unit=Unit.SECONDS,
    meaning="Time of an iteration in which the job only waited for weights.",
    source="the phase Publishing; exemplars name the iteration",
    normal="near the slowest rlhf_weight_update_seconds",
    buckets=buckets.STEP_SECONDS,
)
WEIGHT_BYTES: Final = coordinator_counter(
    "rlhf_weight_update_bytes_total",
    unit=Unit.BYTES,
    meaning="Bytes of weights that workers of a group loaded.",
    source="answers of workers, since the coordinator started",
    normal="the bytes of the model, times workers, in each iteration",
    labels=(labels.WEIGHT_GROUP,),
)
CHECKPOINT_VERSION: Final = coordinator_gauge(
    "rlhf_checkpoint_version",
    unit=Unit.NUMBER,
    meaning="Weight version of the newest complete checkpoint; 0 without a checkpoint.",
    source="the checkpoint folder",
    normal="at most rlhf_checkpoint_interval_iterations behind rlhf_weight_version",
)
CHECKPOINT_INTERVAL: Final = coordinator_gauge(
    "rlhf_checkpoint_interval_iterations",
    unit=Unit.NUMBER,
    meaning="Number of iterations between two checkpoints.",
    source="spec.checkpoints.every",
    normal="constant",
    absent="the job saves no checkpoints",
)
CHECKPOINT_TIME: Final = coordinator_gauge(
    "rlhf_checkpoint_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="Time at which the newest checkpoint was complete.",
    source="the checkpoint's manifest",
    normal="no longer ago than the time of one interval",
    absent="no checkpoint exists",
)
CHECKPOINT_BYTES: Final = coordinator_gauge(
    "rlhf_checkpoint_size_bytes",
    unit=Unit.BYTES,
    meaning="Size of the newest checkpoint.",
    source="the files that ranks wrote",
    normal="weights and optimizer state: 12 to 16 bytes per trained parameter",
    absent="this coordinator has saved no checkpoint",
)
CHECKPOINT_SECONDS: Final = coordinator_histogram(
    "rlhf_checkpoint_seconds",
    unit=Unit.SECONDS,
    meaning="Time to save a checkpoint.",
    source="from the order to the complete folder; exemplars name the version",
    normal="its bytes divided by the speed of the volume",
    buckets=buckets.STEP_SECONDS,
)
CHECKPOINT_FAILURES: Final = coordinator_counter(
    "rlhf_checkpoint_failures_total",
    unit=Unit.NUMBER,
    meaning="Failed attempts to save a checkpoint since the coordinator started.",
    source="the event checkpoint-failed names the reason",
    normal="0; three in a row end the job",
)
TRACKERS_LOST: Final = coordinator_counter(
    "rlhf_trackers_lost_total",
    unit=Unit.NUMBER,
    meaning="Trackers of metrics that failed finally since the coordinator started.",
    source="the event tracker-lost names the tracker and the reason",
    normal="0; the job continues without a lost tracker, and metrics.jsonl has every metric",
)
TRACKER_BEHIND: Final = coordinator_gauge(
    "rlhf_tracker_behind_iterations",
    unit=Unit.NUMBER,
    meaning="Iterations that a service of spec.trackers has not received yet.",
    source="the queue before its process",
    normal="0 or 1; the coordinator gives up a tracker that is 256 iterations behind",
    labels=(labels.TRACKER,),
    absent="spec.trackers does not name the service, or its tracker failed finally",
)
TRACE_SPANS: Final = Metric(
    "rlhf_trace_spans_total",
    kind=MetricKind.COUNTER,
    servers=(Server.COORDINATOR, Server.OPERATOR),
    unit=Unit.NUMBER,
    meaning="Trace spans by outcome: exported, failed (the collector did not take them), or dropped before they were "
    "sent: the queue was full, the process ended, or a span could not be built.",
    source="the thread that sends them, since the process started",
    normal="all spans are exported; the log says since when others are lost",
    labels=(labels.TRACE_OUTCOME,),
    absent="no OpenTelemetry endpoint is set",
)
JOURNAL_BYTES: Final = coordinator_counter(
    "rlhf_journal_bytes_total",
    unit=Unit.BYTES,
    meaning="Bytes that the coordinator wrote to its journal since it started.",
    source="the journal",
    normal="about 20 bytes per token, for the tokens and scores of every sample",
)
DISK_FREE: Final = coordinator_gauge(
    "rlhf_disk_free_bytes",
    unit=Unit.BYTES,
    meaning="Free space of the file system of a folder of the job.",
    source="statvfs: the space for users without privileges",
    normal="far above rlhf_checkpoint_size_bytes plus the journal of a day",
    labels=(labels.FOLDER,),
    absent="the job has no such folder, or its file system does not answer",
)
DISK_SIZE: Final = coordinator_gauge(
    "rlhf_disk_size_bytes",
    unit=Unit.BYTES,
    meaning="Size of the file system of a folder of the job.",
    source="statvfs",
    normal="constant",
    labels=(labels.FOLDER,),
    absent="the job has no such folder, or its file system does not answer",
)
