"""Metrics of a job's samples, and of the workers and messages behind them, from the coordinator.

Rule: no label names the job or a sample: histogram exemplars identify samples. A worker that left has no series.
"""

from typing import Final

from rlhf_common.metrics import buckets, labels
from rlhf_common.metrics.metric import Unit, coordinator_counter, coordinator_gauge, coordinator_histogram

# ---------------------------------------------------------------- samples

SAMPLES: Final = coordinator_gauge(
    "rlhf_samples",
    unit=Unit.SAMPLES,
    meaning="Samples of the iteration in progress by state; they add up to the batch and what refilled it.",
    source="the ledger",
    normal="move from queued to scored in each iteration",
    labels=(labels.SAMPLE_STATE,),
)
UNFINISHED: Final = coordinator_gauge(
    "rlhf_unfinished_samples",
    unit=Unit.SAMPLES,
    meaning="Samples of the iteration whose response is not complete.",
    source="the ledger",
    normal="falls to 0 in each iteration; its last part is the tail",
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
    source="finished samples that were taken in",
    normal="the batch size an iteration",
)
TRUNCATED: Final = coordinator_counter(
    "rlhf_truncated_samples_total",
    unit=Unit.SAMPLES,
    meaning="Responses that ended at rollout.maxResponseTokens.",
    source="finished samples with the reason length",
    normal="below a tenth of rlhf_finished_samples_total once the policy has learned to stop",
)
ABSTAINED: Final = coordinator_counter(
    "rlhf_abstained_samples_total",
    unit=Unit.SAMPLES,
    meaning="Samples that the reward gave no number, which are not trained on.",
    source="scores that abstained",
    normal="0 unless the reward function returns None by design",
)
DECODE_FAILURES: Final = coordinator_counter(
    "rlhf_decode_failures_total",
    unit=Unit.SAMPLES,
    meaning="Tries to decode a sample that failed because of that sample; it is tried again on another worker.",
    source="what workers say of single samples, and ends of workers that held one sample alone",
    normal="0",
)
FAILED: Final = coordinator_counter(
    "rlhf_failed_samples_total",
    unit=Unit.SAMPLES,
    meaning="Samples that no worker could decode and that iterations went on without, which are not trained on.",
    source="the ledger, as rollout.maxFailedSamples allows",
    normal="0",
)
DROPPED: Final = coordinator_counter(
    "rlhf_dropped_samples_total",
    unit=Unit.SAMPLES,
    meaning="Samples that were dropped because all responses to their prompt have equal rewards.",
    source="the ledger, where the algorithm refills",
    normal="0 without refill; a part of the batch with it, which grows as prompts become too easy or stay too hard",
)
REFILLED: Final = coordinator_counter(
    "rlhf_refilled_samples_total",
    unit=Unit.SAMPLES,
    meaning="Samples of prompts that took the place of dropped ones.",
    source="the ledger, where the algorithm refills",
    normal="as many as rlhf_dropped_samples_total; fewer where the rounds are used up",
)
RETURNED: Final = coordinator_counter(
    "rlhf_returned_samples_total",
    unit=Unit.SAMPLES,
    meaning="Leases to decode that were taken back: their worker was lost or reconnected.",
    source="the ledger, of finished iterations and the one in progress",
    normal="0 but when workers are lost",
)
SCORE_FAILURES: Final = coordinator_counter(
    "rlhf_score_failures_total",
    unit=Unit.NUMBER,
    meaning="Tries of a scoring task that failed; a failure is tried again and is never a zero reward.",
    source="scores with a failure, or of a wrong form",
    normal="0; a few when an endpoint has an outage",
    labels=(labels.TASK,),
)
QUEUE_SECONDS: Final = coordinator_histogram(
    "rlhf_sample_queue_seconds",
    unit=Unit.SECONDS,
    meaning="From when an engine has a sample until its first new token: waiting for room, and prefill.",
    source="measured by the worker, for the last lease of each finished sample; exemplars name worker and sample",
    normal="below the time of a few steps; long when more samples are leased than fit into a batch",
    buckets=buckets.SAMPLE_SECONDS,
)
GENERATION_SECONDS: Final = coordinator_histogram(
    "rlhf_sample_generation_seconds",
    unit=Unit.SECONDS,
    meaning="From a sample's first lease until its response is complete.",
    source="the coordinator's clock; exemplars name worker and sample",
    normal="its 99th percentile against its median is the long tail",
    buckets=buckets.SAMPLE_SECONDS,
)
RESPONSE_TOKENS: Final = coordinator_histogram(
    "rlhf_response_tokens",
    unit=Unit.TOKENS,
    meaning="Lengths of finished responses, stop token included.",
    source="finished samples; exemplars name worker and sample",
    normal="a steady distribution; a sudden rise or fall is often reward hacking",
    buckets=buckets.TOKENS,
)
SCORING_SECONDS: Final = coordinator_histogram(
    "rlhf_scoring_latency_seconds",
    unit=Unit.SECONDS,
    meaning="From a response's completion until a scoring task's result for it.",
    source="the coordinator's clock; exemplars name worker and sample",
    normal="seconds with overlap; until the end of generation where no worker scores meanwhile",
    labels=(labels.TASK,),
    buckets=buckets.SAMPLE_SECONDS,
    absent="the task has no result yet",
)
FIRST_SCORE_SECONDS: Final = coordinator_histogram(
    "rlhf_time_to_first_score_seconds",
    unit=Unit.SECONDS,
    meaning="From the first lease of an iteration until its first score.",
    source="the coordinator's clock, once an iteration; exemplars name the iteration",
    normal="soon after the shortest response; at the end of generation without overlap",
    buckets=buckets.SAMPLE_SECONDS,
)

# ---------------------------------------------------------------- workers and messages

SESSIONS: Final = coordinator_gauge(
    "rlhf_sessions",
    unit=Unit.NUMBER,
    meaning="Workers of a group that hold a session with the coordinator.",
    source="the fleet",
    normal="equal to rlhf_workers_wanted",
    labels=(labels.GROUP,),
)
WANTED: Final = coordinator_gauge(
    "rlhf_workers_wanted",
    unit=Unit.NUMBER,
    meaning="Workers that a group is to have.",
    source="the manifest, or the last resize",
    normal="constant but for resizing",
    labels=(labels.GROUP,),
)
LOST: Final = coordinator_counter(
    "rlhf_workers_lost_total",
    unit=Unit.NUMBER,
    meaning="Workers that were lost: their session ended or was silent for too long, though they were wanted.",
    source="the fleet, since the coordinator started",
    normal="0 but for drained nodes and faults",
    labels=(labels.GROUP,),
)
OUT_OF_MEMORY: Final = coordinator_counter(
    "rlhf_worker_out_of_memory_total",
    unit=Unit.NUMBER,
    meaning="Times a worker said that its device or machine gave it no more memory: in a command, for a sample or a "
    "score, or as its last word. Kills by the kernel are rlhf_job_out_of_memory_kills_total.",
    source="failures with the reason OutOfMemory, since the coordinator started",
    normal="0; the failure names the field that lowers what is needed",
    labels=(labels.GROUP,),
)
WORKER_RESTARTS: Final = coordinator_counter(
    "rlhf_worker_restarts_total",
    unit=Unit.NUMBER,
    meaning="Times a worker came back as a new process.",
    source="registrations, since the coordinator started",
    normal="0 but for drained nodes and faults",
    labels=(labels.WORKER,),
)
WORKER_STATE: Final = coordinator_gauge(
    "rlhf_worker_state",
    unit=Unit.STATE,
    meaning="1 for the state a worker is in; the others have no series.",
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
    normal="alike for all workers of a group until the tail",
    labels=(labels.WORKER,),
)
PREFIX_CACHE: Final = coordinator_gauge(
    "rlhf_prefix_cache_bytes",
    unit=Unit.BYTES,
    meaning="Keys and values that a worker holds of samples that are scored before they end.",
    source="what workers say of their prefixes",
    normal="falls to 0 in each iteration",
    labels=(labels.WORKER,),
    absent="the worker scores nothing early",
)
STALE: Final = coordinator_counter(
    "rlhf_stale_messages_total",
    unit=Unit.NUMBER,
    meaning="Messages about samples that were dropped, because another lease is in force.",
    source="the event handlers",
    normal="0; a few after moves and lost workers",
)
MESSAGES: Final = coordinator_counter(
    "rlhf_messages_total",
    unit=Unit.NUMBER,
    meaning="Messages of workers that were taken in.",
    source="the event handlers",
    normal="four a second for each sample that is decoded; fewer with hundreds of workers",
)
BAD_MESSAGES: Final = coordinator_counter(
    "rlhf_bad_messages_total",
    unit=Unit.NUMBER,
    meaning="Invalid messages; each one ended its session.",
    source="the service",
    normal="0; else a worker runs broken or hostile code",
)
