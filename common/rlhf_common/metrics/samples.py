"""Metrics of a job's samples, and of the workers and messages behind them, from the coordinator.

Rule: no label names the job or a sample.
"""

from typing import Final

from rlhf_common.metrics import buckets, labels
from rlhf_common.metrics.metric import Unit, coordinator_counter, coordinator_gauge, coordinator_histogram

# ---------------------------------------------------------------- samples

SAMPLES: Final = coordinator_gauge(
    "rlhf_samples",
    unit=Unit.SAMPLES,
    meaning="Number of samples of the iteration in progress, by state. They add up to the batch and the samples "
    "that refilled it.",
    source="the ledger",
    normal="samples move from queued to scored in each iteration",
    labels=(labels.SAMPLE_STATE,),
)
UNFINISHED: Final = coordinator_gauge(
    "rlhf_unfinished_samples",
    unit=Unit.SAMPLES,
    meaning="Number of samples of the iteration without a complete response.",
    source="the ledger",
    normal="falls to 0 in each iteration; the last part is the tail",
)
TOKENS: Final = coordinator_counter(
    "rlhf_tokens_total",
    unit=Unit.TOKENS,
    meaning="Response tokens decoded, since the coordinator started.",
    source="progress of samples",
    normal="a steady rate in Generating",
)
FINISHED: Final = coordinator_counter(
    "rlhf_finished_samples_total",
    unit=Unit.SAMPLES,
    meaning="Responses finished, since the coordinator started.",
    source="finished samples that the coordinator accepted",
    normal="the batch size in each iteration",
)
TRUNCATED: Final = coordinator_counter(
    "rlhf_truncated_samples_total",
    unit=Unit.SAMPLES,
    meaning="Responses that ended at the limit rollout.maxResponseTokens.",
    source="finished samples with the reason length",
    normal="below a tenth of rlhf_finished_samples_total once the policy has learned to stop",
)
ABSTAINED: Final = coordinator_counter(
    "rlhf_abstained_samples_total",
    unit=Unit.SAMPLES,
    meaning="Samples without a number from the reward. The job does not train on them.",
    source="scores in which the reward abstained",
    normal="0, unless the reward function returns None by design",
)
DECODE_FAILURES: Final = coordinator_counter(
    "rlhf_decode_failures_total",
    unit=Unit.SAMPLES,
    meaning="Attempts to decode a sample that failed because of that sample. Another worker tries the sample again.",
    source="reports of workers about single samples, and ends of workers that had a single sample",
    normal="0",
)
FAILED: Final = coordinator_counter(
    "rlhf_failed_samples_total",
    unit=Unit.SAMPLES,
    meaning="Samples that no worker could decode and that an iteration left out. The job does not train on them.",
    source="the ledger, within the limit rollout.maxFailedSamples",
    normal="0",
)
DROPPED: Final = coordinator_counter(
    "rlhf_dropped_samples_total",
    unit=Unit.SAMPLES,
    meaning="Samples that the job dropped because all responses to their prompt have equal rewards.",
    source="the ledger, for algorithms that refill the batch",
    normal="0 without refill; with refill a part of the batch, which grows if prompts become too easy or stay too hard",
)
REFILLED: Final = coordinator_counter(
    "rlhf_refilled_samples_total",
    unit=Unit.SAMPLES,
    meaning="Samples of prompts that replaced dropped samples.",
    source="the ledger, for algorithms that refill the batch",
    normal="equal to rlhf_dropped_samples_total; lower if the rounds are used up",
)
RETURNED: Final = coordinator_counter(
    "rlhf_returned_samples_total",
    unit=Unit.SAMPLES,
    meaning="Decode leases that the coordinator took back because their worker was lost or reconnected.",
    source="the ledger, for finished iterations and the one in progress",
    normal="0 while no worker is lost",
)
SCORE_FAILURES: Final = coordinator_counter(
    "rlhf_score_failures_total",
    unit=Unit.NUMBER,
    meaning="Failed attempts of a scoring task. The coordinator tries again; a failure does not count as zero.",
    source="scores with a failure, or with a wrong form",
    normal="0; a few during an outage of an endpoint",
    labels=(labels.TASK,),
)
QUEUE_SECONDS: Final = coordinator_histogram(
    "rlhf_sample_queue_seconds",
    unit=Unit.SECONDS,
    meaning="Time from the arrival of a sample in an engine until its first new token. It includes the wait for "
    "a place and the prefill.",
    source="measured by the worker for the last lease of each finished sample; exemplars name worker and sample",
    normal="less than the time of a few steps; longer if a worker leases more samples than fit into a batch",
    buckets=buckets.SAMPLE_SECONDS,
)
GENERATION_SECONDS: Final = coordinator_histogram(
    "rlhf_sample_generation_seconds",
    unit=Unit.SECONDS,
    meaning="Time from the first lease of a sample until its response is complete.",
    source="the coordinator's clock; exemplars name worker and sample",
    normal="the 99th percentile divided by the median shows the long tail",
    buckets=buckets.SAMPLE_SECONDS,
)
RESPONSE_TOKENS: Final = coordinator_histogram(
    "rlhf_response_tokens",
    unit=Unit.TOKENS,
    meaning="Length of finished responses, including the stop token.",
    source="finished samples; exemplars name worker and sample",
    normal="a steady distribution; a sudden rise or fall is often reward hacking",
    buckets=buckets.TOKENS,
)
SCORING_SECONDS: Final = coordinator_histogram(
    "rlhf_scoring_latency_seconds",
    unit=Unit.SECONDS,
    meaning="Time from the end of a response until the result of a scoring task for it.",
    source="the coordinator's clock; exemplars name worker and sample",
    normal="seconds if scoring overlaps generation; otherwise until the end of generation",
    labels=(labels.TASK,),
    buckets=buckets.SAMPLE_SECONDS,
    absent="the task has no result yet",
)
FIRST_SCORE_SECONDS: Final = coordinator_histogram(
    "rlhf_time_to_first_score_seconds",
    unit=Unit.SECONDS,
    meaning="Time from the first lease of an iteration until its first score.",
    source="the coordinator's clock, once per iteration; exemplars name the iteration",
    normal="soon after the shortest response if scoring overlaps generation; otherwise at the end of generation",
    buckets=buckets.SAMPLE_SECONDS,
)

# ---------------------------------------------------------------- workers and messages

SESSIONS: Final = coordinator_gauge(
    "rlhf_sessions",
    unit=Unit.NUMBER,
    meaning="Number of workers of a group that have a session with the coordinator.",
    source="the fleet",
    normal="equal to rlhf_workers_wanted",
    labels=(labels.GROUP,),
)
WANTED: Final = coordinator_gauge(
    "rlhf_workers_wanted",
    unit=Unit.NUMBER,
    meaning="Desired number of workers of a group.",
    source="the manifest, or the last resize",
    normal="constant between resizes",
    labels=(labels.GROUP,),
)
LOST: Final = coordinator_counter(
    "rlhf_workers_lost_total",
    unit=Unit.NUMBER,
    meaning="Wanted workers that were lost: their session ended, or was silent, for too long.",
    source="the fleet, since the coordinator started",
    normal="0, except for drained nodes and faults",
    labels=(labels.GROUP,),
)
OUT_OF_MEMORY: Final = coordinator_counter(
    "rlhf_worker_out_of_memory_total",
    unit=Unit.NUMBER,
    meaning="Failures of a worker because its device or machine had no more memory: in a command, for a sample "
    "or a score, or at its end. rlhf_job_out_of_memory_kills_total counts kills by the kernel.",
    source="failures with the reason OutOfMemory, since the coordinator started",
    normal="0; the failure names the field that lowers the need for memory",
    labels=(labels.GROUP,),
)
WORKER_RESTARTS: Final = coordinator_counter(
    "rlhf_worker_restarts_total",
    unit=Unit.NUMBER,
    meaning="Number of times that a worker returned as a new process.",
    source="registrations, since the coordinator started",
    normal="0, except for drained nodes and faults",
    labels=(labels.WORKER,),
)
WORKER_STATE: Final = coordinator_gauge(
    "rlhf_worker_state",
    unit=Unit.STATE,
    meaning="1 for the current state of a worker; the other states have no series.",
    source="the fleet",
    normal="Ready or Busy",
    labels=(labels.WORKER, labels.WORKER_STATE),
    one_a_set=True,
)
WORKER_TOKENS: Final = coordinator_gauge(
    "rlhf_worker_tokens_per_second",
    unit=Unit.TOKENS_PER_SECOND,
    meaning="Tokens that a worker decoded, scored or trained per second between its last two heartbeats.",
    source="heartbeats",
    normal="similar for all workers of a group until the tail",
    labels=(labels.WORKER,),
)
PREFIX_CACHE: Final = coordinator_gauge(
    "rlhf_prefix_cache_bytes",
    unit=Unit.BYTES,
    meaning="Size of the keys and values that a worker stores for samples that it scores before they end.",
    source="reports of workers about their prefixes",
    normal="falls to 0 in each iteration",
    labels=(labels.WORKER,),
    absent="the worker scores no unfinished samples",
)
STALE: Final = coordinator_counter(
    "rlhf_stale_messages_total",
    unit=Unit.NUMBER,
    meaning="Dropped messages about samples that have another lease now.",
    source="the event handlers",
    normal="0; a few after moves and lost workers",
)
MESSAGES: Final = coordinator_counter(
    "rlhf_messages_total",
    unit=Unit.NUMBER,
    meaning="Messages of workers that the coordinator accepted.",
    source="the event handlers",
    normal="four per second for each sample in decoding; fewer with hundreds of workers",
)
BAD_MESSAGES: Final = coordinator_counter(
    "rlhf_bad_messages_total",
    unit=Unit.NUMBER,
    meaning="Invalid messages. Each one ended the session that sent it.",
    source="the service",
    normal="0; if not, a worker runs broken or hostile code",
)
