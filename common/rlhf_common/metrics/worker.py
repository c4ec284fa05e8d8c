"""Metrics of one worker from itself.

An engine's own metrics (`vllm:*` for vLLM) are on the same endpoint, under the engine's names.
"""

from functools import partial
from typing import Final

from rlhf_common.metrics import labels
from rlhf_common.metrics.metric import Metric, MetricKind, Server, Unit

_OWN: Final = (labels.OWN_WORKER, labels.OWN_GROUP)
_gauge = partial(Metric, kind=MetricKind.GAUGE, servers=(Server.WORKER,), labels=_OWN)
_counter = partial(Metric, kind=MetricKind.COUNTER, servers=(Server.WORKER,), labels=_OWN)

TOKENS: Final = _counter(
    "rlhf_worker_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens that the worker decoded, scored or trained since it started.",
    source="the roles of the worker",
    normal="a steady rate while the worker has work",
)
BUSY: Final = _counter(
    "rlhf_worker_busy_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time for which the worker's compute thread worked since the worker started.",
    source="the compute thread",
    normal="rate above 0.7 for generation",
)
ACTIVE: Final = _gauge(
    "rlhf_worker_active_samples",
    unit=Unit.SAMPLES,
    meaning="Number of samples in the roles of the worker.",
    source="the compute thread",
    normal="an eighth more than generation.maxBatchSize, until the tail",
)
QUEUED: Final = _gauge(
    "rlhf_worker_queued_samples",
    unit=Unit.SAMPLES,
    meaning="Number of samples in commands that the worker has not started yet.",
    source="the compute thread",
    normal="0; a whole batch for moments",
)
WEIGHTS: Final = _gauge(
    "rlhf_worker_weight_version",
    unit=Unit.NUMBER,
    meaning="Weight version that the worker has loaded, by model role.",
    source="the roles of the worker",
    normal="rlhf_weight_version of the coordinator, except while the worker loads weights",
    labels=(*_OWN, labels.MODEL),
    absent="the worker has loaded no weights yet",
)
CONNECTED: Final = _gauge(
    "rlhf_worker_connected",
    unit=Unit.STATE,
    meaning="1 while the worker has a session with its coordinator, otherwise 0.",
    source="the session",
    normal="1",
)
DEVICE_USED: Final = _gauge(
    "rlhf_worker_device_memory_used_bytes",
    unit=Unit.BYTES,
    meaning="Memory of the worker's GPU in use by all processes.",
    source="cudaMemGetInfo",
    normal="below rlhf_worker_device_memory_size_bytes; falls when a colocated role is offloaded",
    absent="the worker computes on a CPU",
)
DEVICE_SIZE: Final = _gauge(
    "rlhf_worker_device_memory_size_bytes",
    unit=Unit.BYTES,
    meaning="Memory size of the worker's GPU.",
    source="cudaMemGetInfo",
    normal="constant",
    absent="the worker computes on a CPU",
)
MOVED: Final = _counter(
    "rlhf_worker_moved_bytes_total",
    unit=Unit.BYTES,
    meaning="Bytes that moved between memories since the worker started, by the kind of move.",
    source="loads of weights, offload and onload, migrations",
    normal="for offload and onload, the rate is near the speed of the host's bus",
    labels=(*_OWN, labels.MOVE),
    absent="nothing has moved yet",
)
MOVE_SECONDS: Final = _counter(
    "rlhf_worker_move_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time of moves between memories since the worker started, by the kind of move.",
    source="loads of weights, offload and onload, migrations",
    normal="a small part of an iteration",
    labels=(*_OWN, labels.MOVE),
    absent="nothing has moved yet",
)

# ---------------------------------------------------------------- engines of generation

_NO_ENGINE: Final = "the worker does not generate"
_engine = partial(_counter, absent=_NO_ENGINE)
_steps = partial(_engine, source="reports of steps")

ENGINE: Final = _gauge(
    "rlhf_worker_engine",
    unit=Unit.STATE,
    meaning="1 for the engine that decodes in the worker, with the reason of the choice. `own` is an engine of "
    "the user.",
    source="the choice at the start of generation",
    normal="the same engine in all workers of a job",
    labels=(*_OWN, labels.ENGINE, labels.ENGINE_REASON),
    one_a_set=True,
    absent="the worker does not generate",
)
ENGINE_STEPS: Final = _steps(
    "rlhf_engine_steps_total",
    unit=Unit.NUMBER,
    meaning="Decode steps of the engine, since the worker started.",
    normal="decode seconds / steps is the time of a step",
)
ENGINE_ROWS: Final = _steps(
    "rlhf_engine_step_samples_total",
    unit=Unit.SAMPLES,
    meaning="Sum over decode steps of the samples in each step. Divided by rlhf_engine_steps_total, it is the "
    "mean batch size of a step.",
    normal="the mean batch size is near generation.maxBatchSize until the tail",
)
ENGINE_DECODED: Final = _steps(
    "rlhf_engine_decoded_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens that the engine sampled since the worker started.",
    normal="equal to rlhf_engine_step_samples_total; higher with speculation",
)
ENGINE_PREFILLED: Final = _steps(
    "rlhf_engine_prefilled_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens of prompts and of resumed responses that the engine computed in prefill.",
    normal="the prompts of an iteration; more after moves by tokens",
)
ENGINE_KEPT: Final = _steps(
    "rlhf_engine_kept_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens whose KV cache the engine reused in the next turn of a dialogue, instead of a new prefill.",
    normal="0 without rollout.environment; with an environment, more than rlhf_engine_prefilled_tokens_total "
    "after two turns",
)
ENGINE_DECODE_SECONDS: Final = _steps(
    "rlhf_engine_decode_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time of steps outside prefill.",
    normal="most of the engine's time",
)
ENGINE_PREFILL_SECONDS: Final = _steps(
    "rlhf_engine_prefill_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time of steps in prefill.",
    normal="a tenth of the engine's time; more with long prompts",
)
ENGINE_PASSES: Final = _steps(
    "rlhf_engine_passes_total",
    unit=Unit.NUMBER,
    meaning="Decode passes of the engine; with vLLM, which prefills and decodes in the same passes, all its passes. A "
    "decode step has one pass, or several in a deterministic job.",
    normal="equal to rlhf_engine_steps_total; with vLLM more, because steps that only prefill have a pass, too",
)
ENGINE_GRAPH_PASSES: Final = _steps(
    "rlhf_engine_graph_passes_total",
    unit=Unit.NUMBER,
    meaning="Decode passes that replayed a captured graph.",
    normal="on a GPU, nine of ten of rlhf_engine_passes_total; 0 if staticShapes is off, and with vLLM, which does not "
    "report them",
)
ENGINE_FUSED_PASSES: Final = _steps(
    "rlhf_engine_fused_passes_total",
    unit=Unit.NUMBER,
    meaning="Decode passes that ran with fused kernels, each of which covers several operations of the model.",
    normal="equal to rlhf_engine_passes_total, or 0; 0 if fusedKernels is off or was measured to be slower, and with "
    "vLLM",
)
ENGINE_CAPTURE_SECONDS: Final = _steps(
    "rlhf_engine_capture_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time of steps that captured graphs.",
    normal="rises after a start, after a wake, and when a sample is longer than all before; otherwise constant",
)
_SAYS_NOTHING: Final = "the worker does not generate, or its engine does not say (that of torch)"
_load = partial(_gauge, absent=_SAYS_NOTHING)
_cache = partial(_counter, absent=_SAYS_NOTHING)

ENGINE_RUNNING: Final = _load(
    "rlhf_engine_running_samples",
    unit=Unit.SAMPLES,
    meaning="Samples in the engine's batch. A sample that pauses for a move keeps its place.",
    source="the engine's scheduler, after its last step",
    normal="generation.maxBatchSize until the tail",
)
ENGINE_WAITING: Final = _load(
    "rlhf_engine_waiting_samples",
    unit=Unit.SAMPLES,
    meaning="Samples in the engine outside its batch: without a place in it or in the caches, or paused before they "
    "had one.",
    source="the engine's scheduler, after its last step",
    normal="an eighth of generation.maxBatchSize, which the worker leases ahead",
)
ENGINE_KV_USED: Final = _load(
    "rlhf_engine_kv_used_share",
    unit=Unit.RATIO,
    meaning="Share of the engine's KV cache space in use by samples.",
    source="the engine's cache manager, after its last step",
    normal="below 0.9; at 1 the engine preempts samples and computes them again",
)
ENGINE_PREEMPTIONS: Final = _cache(
    "rlhf_engine_preemptions_total",
    unit=Unit.SAMPLES,
    meaning="Preempted samples, because the cache was full or new weights were loaded. The engine computes them again.",
    source="the engine's scheduler",
    normal="0; after each load of weights, one for every sample in flight",
)
ENGINE_PREFIX_TOKENS: Final = _cache(
    "rlhf_engine_prefix_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens that the engine looked up in its prefix cache.",
    source="the engine's cache manager",
    normal="the prompts of an iteration",
)
ENGINE_PREFIX_HITS: Final = _cache(
    "rlhf_engine_prefix_hit_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens that the engine found in its prefix cache and did not compute again.",
    source="the engine's cache manager",
    normal="for each group of responses to a prompt, the prompt of all but one response, in whole blocks",
)
ENGINE_SLEEPS: Final = _engine(
    "rlhf_engine_sleeps_total",
    unit=Unit.NUMBER,
    meaning="Number of times that the engine gave its memory to scoring or training.",
    source="the generation role",
    normal="one per iteration if workers are released or share their device",
)
ENGINE_FREED: Final = _engine(
    "rlhf_engine_freed_bytes_total",
    unit=Unit.BYTES,
    meaning="Bytes of device memory that the engine released in its sleeps; on a CPU, bytes of the process.",
    source="cudaMemGetInfo; on a CPU, the resident set",
    normal="for each sleep, the size of the caches; on a GPU, also the weights",
)
