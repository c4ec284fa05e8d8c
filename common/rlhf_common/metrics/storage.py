"""Metrics of weights, checkpoints, trackers, traces, the journal and their disks, from the coordinator.

Rule: disks are read at a scrape, at most every ten seconds, and never on the event loop. A disk that does not answer
has no series.
"""

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
    meaning="Weight version the job has reached; version i + 1 is the outcome of iteration i.",
    source="the ledger",
    normal="one more each iteration",
)
WEIGHT_UPDATE: Final = coordinator_histogram(
    "rlhf_weight_update_seconds",
    unit=Unit.SECONDS,
    meaning="Time in which one worker loaded a new weight version from the training ranks.",
    source="measured by the worker; exemplars name worker and version",
    normal="the bytes of the model over the speed of the link",
    labels=(labels.WEIGHT_GROUP,),
    buckets=buckets.STEP_SECONDS,
    absent="no worker of the group has loaded a version yet",
)
WEIGHT_COPY: Final = coordinator_histogram(
    "rlhf_weight_update_copy_seconds",
    unit=Unit.SECONDS,
    meaning="Time of an update in which one worker put weights in place that had come: it decodes nothing meanwhile.",
    source="measured by the worker; exemplars name worker and version",
    normal="the bytes of the model over the speed of the worker's memory; under rlhf_weight_update_seconds",
    labels=(labels.WEIGHT_GROUP,),
    buckets=buckets.STEP_SECONDS,
    absent="no worker of the group has loaded a version yet",
)
WEIGHT_PAUSED: Final = coordinator_histogram(
    "rlhf_weight_update_paused_seconds",
    unit=Unit.SECONDS,
    meaning="Time of an iteration in which the job waited for weights alone.",
    source="its phase Publishing; exemplars name the iteration",
    normal="near the slowest rlhf_weight_update_seconds",
    buckets=buckets.STEP_SECONDS,
)
WEIGHT_BYTES: Final = coordinator_counter(
    "rlhf_weight_update_bytes_total",
    unit=Unit.BYTES,
    meaning="Weights that workers of a group loaded.",
    source="answers of workers, since the coordinator started",
    normal="bytes of the model, times workers, an iteration",
    labels=(labels.WEIGHT_GROUP,),
)
CHECKPOINT_VERSION: Final = coordinator_gauge(
    "rlhf_checkpoint_version",
    unit=Unit.NUMBER,
    meaning="Weight version of the newest complete checkpoint; 0 without one.",
    source="the checkpoint folder",
    normal="at most rlhf_checkpoint_interval_iterations behind rlhf_weight_version",
)
CHECKPOINT_INTERVAL: Final = coordinator_gauge(
    "rlhf_checkpoint_interval_iterations",
    unit=Unit.NUMBER,
    meaning="Iterations between two checkpoints.",
    source="spec.checkpoints.every",
    normal="constant",
    absent="the job makes no checkpoints",
)
CHECKPOINT_TIME: Final = coordinator_gauge(
    "rlhf_checkpoint_timestamp_seconds",
    unit=Unit.TIMESTAMP,
    meaning="When the newest checkpoint was complete; its age is time() less this.",
    source="the checkpoint's manifest",
    normal="at most the interval, in time of iterations, ago",
    absent="there is no checkpoint",
)
CHECKPOINT_BYTES: Final = coordinator_gauge(
    "rlhf_checkpoint_size_bytes",
    unit=Unit.BYTES,
    meaning="Size of the newest checkpoint.",
    source="the files that ranks wrote",
    normal="weights and optimizer state: 12 to 16 bytes a parameter that is trained",
    absent="this coordinator has made no checkpoint",
)
CHECKPOINT_SECONDS: Final = coordinator_histogram(
    "rlhf_checkpoint_seconds",
    unit=Unit.SECONDS,
    meaning="Time to create a checkpoint.",
    source="from the order to the complete folder; exemplars name the version",
    normal="its bytes over the speed of the volume",
    buckets=buckets.STEP_SECONDS,
)
CHECKPOINT_FAILURES: Final = coordinator_counter(
    "rlhf_checkpoint_failures_total",
    unit=Unit.NUMBER,
    meaning="Tries to make a checkpoint that failed, since the coordinator started.",
    source="the event checkpoint-failed says why",
    normal="0; three in a row end the job",
)
TRACKERS_LOST: Final = coordinator_counter(
    "rlhf_trackers_lost_total",
    unit=Unit.NUMBER,
    meaning="Trackers of metrics that failed for good, since the coordinator started.",
    source="the event tracker-lost says which and why",
    normal="0; the job continues without them, and metrics.jsonl has everything",
)
TRACKER_BEHIND: Final = coordinator_gauge(
    "rlhf_tracker_behind_iterations",
    unit=Unit.NUMBER,
    meaning="Iterations that a service of spec.trackers has not taken yet.",
    source="the queue before its process",
    normal="0 or 1; one that is 256 behind is given up",
    labels=(labels.TRACKER,),
    absent="spec.trackers does not name it, or it failed for good",
)
TRACE_SPANS: Final = Metric(
    "rlhf_trace_spans_total",
    kind=MetricKind.COUNTER,
    servers=(Server.COORDINATOR, Server.OPERATOR),
    unit=Unit.NUMBER,
    meaning="Spans that the collector took, that it did not take, and that found no room before, by outcome.",
    source="the thread that sends them, since the process started",
    normal="all exported; the log says since when the others are lost",
    labels=(labels.TRACE_OUTCOME,),
    absent="no endpoint of OpenTelemetry is set",
)
JOURNAL_BYTES: Final = coordinator_counter(
    "rlhf_journal_bytes_total",
    unit=Unit.BYTES,
    meaning="Bytes journaled, since the coordinator started.",
    source="the journal",
    normal="tokens and scores of every sample: some 20 bytes a token",
)
DISK_FREE: Final = coordinator_gauge(
    "rlhf_disk_free_bytes",
    unit=Unit.BYTES,
    meaning="Free space of the file system that a folder of the job is on.",
    source="statvfs, what a user without privileges may use",
    normal="far above rlhf_checkpoint_size_bytes and a day of journal",
    labels=(labels.FOLDER,),
    absent="the job has no such folder, or its file system does not answer",
)
DISK_SIZE: Final = coordinator_gauge(
    "rlhf_disk_size_bytes",
    unit=Unit.BYTES,
    meaning="Size of the file system that a folder of the job is on.",
    source="statvfs",
    normal="constant",
    labels=(labels.FOLDER,),
    absent="the job has no such folder, or its file system does not answer",
)
