"""The labels of this project's metrics, with their values or the bound of those."""

from typing import Final

from rlhf_common.conditions import ConditionType, RunningReason
from rlhf_common.metrics.metric import Label
from rlhf_common.names import PHASES, Group
from rlhf_common.tracing.export import OUTCOMES

JOBS: Final = 1000
"""Jobs per operator at the measured scale."""
WORKERS: Final = 1024
"""Workers per job at the measured scale."""

_GROUPS: Final = tuple(group.value for group in Group)
_WORKER_GROUPS: Final = tuple(group.value for group in Group if group is not Group.COORDINATOR)

STAGES: Final = ("generation", "inference", "training", "weight_update", "checkpoint", "wait", "other")
"""Stages of an iteration's time, which add up to the whole."""
IDLE_CAUSES: Final = (
    "tail",
    "no_work",
    "generation",
    "inference",
    "training",
    "weight_update",
    "checkpoint",
    "turn",
    "recovering",
    "starting",
)
"""Reasons why a GPU of a job computes nothing."""
WAITING_REASONS: Final = tuple(
    reason.value
    for reason in (
        RunningReason.PENDING,
        RunningReason.QUEUED,
        RunningReason.NAME_TAKEN,
        RunningReason.RELEASED,
        RunningReason.UNSCHEDULABLE,
        RunningReason.STARTING,
    )
)
"""Reasons why a job does not run yet."""

NAMESPACE: Final = Label("namespace", "namespace of the job", bound="jobs", limit=JOBS)
RLHF_JOB: Final = Label("rlhf_job", "name of the job", bound="one for each namespace and job", limit=1)
JOB: Final = (NAMESPACE, RLHF_JOB)

RESULT: Final = Label("result", "result of a reconcile", ("ok", "conflict", "error"))
ERROR: Final = Label("reason", "kind of error", bound="kinds of errors of the operator", limit=6)
VERB: Final = Label("verb", "HTTP verb", bound="verbs the operator uses", limit=6)
RESOURCE: Final = Label("resource", "kind of object", bound="kinds the operator watches or writes", limit=12)
CODE: Final = Label("code", "HTTP status, 0 for no answer", bound="status codes the API server gave", limit=12)
OBJECT_KIND: Final = Label("kind", "kind of object", bound="kinds the operator reads", limit=8)
VERSION: Final = Label("version", "version of the package", bound="one", limit=1)

CONDITION: Final = Label("condition", "type of condition", tuple(item.value for item in ConditionType))
STATUS: Final = Label("status", "status of the condition", ("True", "False", "Unknown"))
POD_GROUP: Final = Label("group", "group of the job's pods", _GROUPS)
POD_PHASE: Final = Label("phase", "phase of the pods", ("Pending", "Running", "Succeeded", "Failed", "Unknown"))
RESTART: Final = Label("reason", "kind of the end", ("failure", "disruption"))
RESIZED_GROUP: Final = Label("group", "group that can be resized", ("generation", "inference"))
JOB_PHASE: Final = Label("phase", "phase that kubectl get rlhf shows", tuple(item.value for item in RunningReason))
WAITING: Final = Label("reason", "reason why the job does not run yet", WAITING_REASONS)
ALGORITHM: Final = Label("algorithm", "algorithm of the job", bound="one per job", limit=1)
QUEUE: Final = Label("queue", "queue that admits the job; empty without a queue", bound="one per job", limit=1)

PHASE: Final = Label("phase", "phase of the coordinator", PHASES)
SAMPLE_STATE: Final = Label(
    "state",
    "state of samples",
    ("queued", "decoding", "migrating", "generated", "scored", "trained", "failed", "dropped", "cut"),
)
WORKER: Final = Label("worker", "such as generation-0", bound="workers of the job", limit=WORKERS)
OWN_WORKER: Final = Label("worker", "such as generation-0", bound="the worker that serves it", limit=1)
OWN_GROUP: Final = Label("group", "group of the worker", bound="the worker that serves it", limit=1)
WORKER_STATE: Final = Label("state", "state of the worker", ("Missing", "Starting", "Ready", "Busy", "Lost"))
GROUP: Final = Label("group", "group of workers", _WORKER_GROUPS)
WEIGHT_GROUP: Final = Label("group", "group of workers that load weights", ("generation", "inference"))
STAGE: Final = Label("stage", "stage of the iteration", STAGES)
CAUSE: Final = Label("cause", "reason why GPUs are idle", IDLE_CAUSES)
TASK: Final = Label(
    "task", "scoring task of the algorithm's graph", bound="tasks of the graph, at most eight of them rewards", limit=12
)
MOVE: Final = Label(
    "move",
    "data that moved between memories, and the way",
    (
        "weights_stream",
        "weights_folder",
        "weights_host_memory",
        "weights_device_memory",
        "kv_cache_out",
        "offload",
        "onload",
    ),
)
MODEL: Final = Label("model", "model role", bound="models of the algorithm's graph", limit=6)
RUN_METRIC: Final = Label("name", "name in metrics.jsonl", bound="the first 256 names of an iteration", limit=256)
FUSION: Final = Label("fusion", "with or without inter-stage fusion", ("with", "without"))
MOVED_BY: Final = Label("by", "a move with the KV cache, or with tokens alone", ("kv", "tokens"))
COST: Final = Label(
    "kind", "kind of work", ("decode", "score", "transfer", "pause", "rebuild", "command", "contention")
)
METHOD: Final = Label("method", "method of the training schedule", bound="methods of the planner", limit=8)
FORECAST: Final = Label("source", "predicted by the schedule, or measured", ("predicted", "measured"))
TRACKER: Final = Label("tracker", "service of spec.trackers", ("wandb", "mlflow"))
TRACE_OUTCOME: Final = Label("outcome", "outcome of trace spans", OUTCOMES)
FOLDER: Final = Label("folder", "folder of the job", ("run", "checkpoints"))
DRAFTER: Final = Label("drafter", "drafter of the tokens", ("Siblings", "Ngram", "Model", "Ahead"))
POSITION: Final = Label("position", "position in the draft, from 0", ("0", "1-3", "4-15"))
SHARED: Final = Label("outcome", "outcome of tokens that are shared as draft hints", ("sent", "dropped"))
ENGINE: Final = Label("engine", "engine that decodes", ("torch", "vllm", "own"))
DRAFT_BUDGET: Final = Label(
    "budget", "maximum number of drafted tokens per sample, on average", ("0", "1", "2", "4", "8")
)
DRAFT_REASON: Final = Label(
    "reason",
    "reason why the step drafted or did not",
    ("Fixed", "Unmeasured", "Faster", "Slower", "Probe"),
)
ENGINE_REASON: Final = Label(
    "reason",
    "reason why this engine decodes",
    ("Named", "TensorParallel", "EngineArgs", "Environment", "NoGpu", "Deterministic", "NotServed", "Served"),
)
