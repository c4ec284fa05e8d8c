"""Metrics of one worker from itself. Rule: they end with the worker's process.

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
    meaning="Tokens decoded, scored or trained, since the worker started.",
    source="the roles of the worker",
    normal="a steady rate while it has work",
)
BUSY: Final = _counter(
    "rlhf_worker_busy_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time the worker's compute thread worked, since the worker started.",
    source="the compute thread",
    normal="rate above 0.7 for generation",
)
ACTIVE: Final = _gauge(
    "rlhf_worker_active_samples",
    unit=Unit.SAMPLES,
    meaning="Samples held by the roles of the worker.",
    source="the compute thread",
    normal="generation.maxBatchSize and an eighth more, until the tail",
)
QUEUED: Final = _gauge(
    "rlhf_worker_queued_samples",
    unit=Unit.SAMPLES,
    meaning="Samples in commands that the worker has not obeyed yet.",
    source="the compute thread",
    normal="0, and a batch for moments",
)
WEIGHTS: Final = _gauge(
    "rlhf_worker_weight_version",
    unit=Unit.NUMBER,
    meaning="Weight version that the worker holds, by model role.",
    source="the roles of the worker",
    normal="rlhf_weight_version of the coordinator, but while weights are loaded",
    labels=(*_OWN, labels.MODEL),
    absent="it holds no weights yet",
)
CONNECTED: Final = _gauge(
    "rlhf_worker_connected",
    unit=Unit.STATE,
    meaning="1 while the worker holds a session with its coordinator.",
    source="the session",
    normal="1",
)
DEVICE_USED: Final = _gauge(
    "rlhf_worker_device_memory_used_bytes",
    unit=Unit.BYTES,
    meaning="Memory of the worker's GPU that is in use, by whichever process.",
    source="cudaMemGetInfo",
    normal="below rlhf_worker_device_memory_size_bytes; falls when a colocated role is offloaded",
    absent="the worker computes on a CPU",
)
DEVICE_SIZE: Final = _gauge(
    "rlhf_worker_device_memory_size_bytes",
    unit=Unit.BYTES,
    meaning="Memory of the worker's GPU.",
    source="cudaMemGetInfo",
    normal="constant",
    absent="the worker computes on a CPU",
)
MOVED: Final = _counter(
    "rlhf_worker_moved_bytes_total",
    unit=Unit.BYTES,
    meaning="Bytes moved between memories, by what went and how, since the worker started.",
    source="loads of weights, offload and onload, migrations",
    normal="bytes / seconds near the bus of the host for offload and onload",
    labels=(*_OWN, labels.MOVE),
    absent="nothing was moved yet",
)
MOVE_SECONDS: Final = _counter(
    "rlhf_worker_move_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time that moves between memories took, by what went and how, since the worker started.",
    source="loads of weights, offload and onload, migrations",
    normal="a small part of an iteration",
    labels=(*_OWN, labels.MOVE),
    absent="nothing was moved yet",
)

# ---------------------------------------------------------------- engines of generation

_NO_ENGINE: Final = "the worker does not generate"
_engine = partial(_counter, absent=_NO_ENGINE)
_steps = partial(_engine, source="reports of steps")

ENGINE: Final = _gauge(
    "rlhf_worker_engine",
    unit=Unit.STATE,
    meaning="1: the engine that decodes in the worker, and why it is this one; `own` is a module of the user's.",
    source="the choice when the worker began to generate",
    normal="the same engine in all workers of a job",
    labels=(*_OWN, labels.ENGINE, labels.ENGINE_REASON),
    one_a_set=True,
    absent="it does not generate",
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
    meaning="Samples in decode steps, added up; divided by rlhf_engine_steps_total the mean batch of a step.",
    normal="a mean batch near generation.maxBatchSize until the tail",
)
ENGINE_DECODED: Final = _steps(
    "rlhf_engine_decoded_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens sampled by the engine, since the worker started.",
    normal="as rlhf_engine_step_samples_total; more where it speculates",
)
ENGINE_PREFILLED: Final = _steps(
    "rlhf_engine_prefilled_tokens_total",
    unit=Unit.TOKENS,
    meaning="Prompt tokens, and tokens of resumed responses, that ran through the model.",
    normal="the prompts of an iteration; more after moves by tokens",
)
ENGINE_KEPT: Final = _steps(
    "rlhf_engine_kept_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens whose caches were kept from one turn to the next, and did not run through the model again.",
    normal="0 without rollout.environment; with one, more than rlhf_engine_prefilled_tokens_total after two turns",
)
ENGINE_DECODE_SECONDS: Final = _steps(
    "rlhf_engine_decode_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time of steps that was not prefill.",
    normal="most of the engine's time",
)
ENGINE_PREFILL_SECONDS: Final = _steps(
    "rlhf_engine_prefill_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time of steps that was prefill.",
    normal="a tenth of the engine's time, with long prompts more",
)
ENGINE_PASSES: Final = _steps(
    "rlhf_engine_passes_total",
    unit=Unit.NUMBER,
    meaning="Decode passes of the engine: one a step, several in a deterministic job.",
    normal="as rlhf_engine_steps_total",
)
ENGINE_GRAPH_PASSES: Final = _steps(
    "rlhf_engine_graph_passes_total",
    unit=Unit.NUMBER,
    meaning="Decode passes that were replayed from a captured graph.",
    normal="on a GPU nine of ten of rlhf_engine_passes_total; 0 where staticShapes is off",
)
ENGINE_FUSED_PASSES: Final = _steps(
    "rlhf_engine_fused_passes_total",
    unit=Unit.NUMBER,
    meaning="Decode passes that ran by kernels of several steps of the model each.",
    normal="all of rlhf_engine_passes_total or none; none where fusedKernels is off, or was measured to be slower",
)
ENGINE_CAPTURE_SECONDS: Final = _steps(
    "rlhf_engine_capture_seconds_total",
    unit=Unit.SECONDS,
    meaning="Time of steps that captured graphs.",
    normal="rises after a start, a wake and when samples are longer than ever; else constant",
)
_SAYS_NOTHING: Final = "the worker does not generate, or its engine does not say (that of torch)"
_load = partial(_gauge, absent=_SAYS_NOTHING)
_cache = partial(_counter, absent=_SAYS_NOTHING)

ENGINE_RUNNING: Final = _load(
    "rlhf_engine_running_samples",
    unit=Unit.SAMPLES,
    meaning="Samples that the engine decodes.",
    source="the engine's scheduler, after its last step",
    normal="generation.maxBatchSize until the tail",
)
ENGINE_WAITING: Final = _load(
    "rlhf_engine_waiting_samples",
    unit=Unit.SAMPLES,
    meaning="Samples in the engine that have no place in its batch or its caches yet.",
    source="the engine's scheduler, after its last step",
    normal="an eighth of generation.maxBatchSize, which is leased ahead",
)
ENGINE_KV_USED: Final = _load(
    "rlhf_engine_kv_used_share",
    unit=Unit.RATIO,
    meaning="Share of the engine's room for keys and values that samples hold.",
    source="the engine's cache manager, after its last step",
    normal="below 0.9; at 1 samples lose their place and are computed again",
)
ENGINE_PREEMPTIONS: Final = _cache(
    "rlhf_engine_preemptions_total",
    unit=Unit.SAMPLES,
    meaning="Samples that lost their place for want of cache, or by a load of weights, and were computed again.",
    source="the engine's scheduler",
    normal="0; one after each load of weights for every sample in flight",
)
ENGINE_PREFIX_TOKENS: Final = _cache(
    "rlhf_engine_prefix_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens that were looked for among the prefixes of earlier samples.",
    source="the engine's cache manager",
    normal="the prompts of an iteration",
)
ENGINE_PREFIX_HITS: Final = _cache(
    "rlhf_engine_prefix_hit_tokens_total",
    unit=Unit.TOKENS,
    meaning="Tokens that were found among the prefixes of earlier samples, and not computed again.",
    source="the engine's cache manager",
    normal="all but one of every group of responses to a prompt, in whole blocks",
)
ENGINE_SLEEPS: Final = _engine(
    "rlhf_engine_sleeps_total",
    unit=Unit.NUMBER,
    meaning="Times that the engine gave its memory to scoring or training.",
    source="the generation role",
    normal="one an iteration where workers are released or share their device",
)
ENGINE_FREED: Final = _engine(
    "rlhf_engine_freed_bytes_total",
    unit=Unit.BYTES,
    meaning="Bytes of the device (on a CPU: of the process) that a sleep released.",
    source="cudaMemGetInfo; on a CPU the resident set",
    normal="for each sleep the room for caches, on a GPU and the weights",
)
