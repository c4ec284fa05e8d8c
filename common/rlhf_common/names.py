"""Names that more than one process must agree on: API group, labels, ports, environment, exit codes.

Rule: a name used on both sides of a process boundary is written once, here. There is no behaviour in this module, but
for the forms of composed names.
"""

from enum import IntEnum, StrEnum
from typing import Final

GROUP: Final = "rlhf.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "RLHFJob"
PLURAL: Final = "rlhfjobs"
SINGULAR: Final = "rlhfjob"
SHORT_NAMES: Final = ("rlhf", "rlhfjob")
FIELD_MANAGER: Final = "rlhf-operator"
STATUS_FIELD_MANAGER: Final = "rlhf-operator-status"

LABEL_JOB_NAME: Final = "rlhf.dev/job-name"
LABEL_JOB_UID: Final = "rlhf.dev/job-uid"
LABEL_GROUP: Final = "rlhf.dev/group"
LABEL_INDEX: Final = "rlhf.dev/index"
LABEL_EPOCH: Final = "rlhf.dev/epoch"
LABEL_POOL: Final = "rlhf.dev/migration-pool"
ANNOTATION_TEMPLATE: Final = "rlhf.dev/template"
"""Annotation of a pod: hash of the user's template from which it was created."""
FINALIZER: Final = "rlhf.dev/checkpoint"
"""Finalizer of a job whose spec.checkpoints.onDeletion is Save: it stays until the last checkpoint is made."""

COORDINATOR_PORT: Final = 7700
"""gRPC port of a job's coordinator inside its pod."""
WORKER_PORT: Final = 7710
"""gRPC port a worker serves to its peers (weights, later KV caches)."""
METRICS_PORT: Final = 7790
"""Prometheus port of coordinator and workers."""
RANK_METRICS_PORT: Final = 7800
"""In a pod of several ranks: port of the first at which its launcher reads metrics and liveness, the next has the next.
Their gRPC ports begin at WORKER_PORT."""
RANK_RENDEZVOUS_PORT: Final = 7900
"""In a pod of several ranks: port of the first for the rendezvous, the next has the next."""

DRAFT_MODEL: Final = "draft"
"""Under which a draft model that is trained travels and is saved, where other models have their role. It is no role of
any algorithm: what a job trains does not depend on it."""
DRAFT_MODEL_FIELD: Final = "spec.generation.speculation.draftModel.path"
"""Where the draft model comes from."""

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
"""Files of a PEFT folder."""
ADAPTER_FIELD: Final = "spec.training.lora.adapter"
"""Where the adapters come from that a job starts from."""

DEVICE_TURN_SPANS: Final = ("offload/", "onload/")
"""How names of spans begin in which a role gives up its device or takes it."""


class Group(StrEnum):
    """The three groups of worker processes of a job, and the coordinator."""

    COORDINATOR = "coordinator"
    GENERATION = "generation"
    INFERENCE = "inference"
    TRAINING = "training"


PHASES: Final = (
    "Starting",
    "Generating",
    "Scoring",
    "Training",
    "Publishing",
    "Checkpointing",
    "Recovering",
    "Complete",
    "Failed",
    "Stopped",
)
"""Phases of a coordinator, as in `JobStatus.phase`."""


class Env(StrEnum):
    """Environment variables with which a process of a job is started; workers know nothing else about where they
    run."""

    JOB_FILE = "RLHF_JOB_FILE"
    """Coordinator only: path of the resolved RLHFJob (YAML or JSON)."""
    RUN_DIR = "RLHF_RUN_DIR"
    """Coordinator only: folder for journal, metrics.jsonl, events, timeline."""
    RESUME = "RLHF_RESUME"
    """Coordinator only: 1 begins a fresh journal at the newest checkpoint; an existing journal is always continued."""
    COORDINATOR = "RLHF_COORDINATOR"
    """Workers: host:port of the coordinator."""
    LISTEN = "RLHF_LISTEN"
    """host:port this process's own gRPC server binds."""
    ADVERTISE = "RLHF_ADVERTISE"
    """host:port under which peers reach this process's gRPC server."""
    RENDEZVOUS = "RLHF_RENDEZVOUS"
    """Training ranks: host under which the other ranks reach this one."""
    RENDEZVOUS_PORT = "RLHF_RENDEZVOUS_PORT"
    """Training ranks: port at which this one opens the store where ranks meet; unset: it picks a free port when it
    starts, which is right in a pod, where no other process is."""
    RANKS = "RLHF_RANKS"
    """Launcher of a pod of several ranks: how many. RLHF_INDEX is the pod's then, and LISTEN, ADVERTISE, DEVICE,
    RENDEZVOUS_PORT and RANK_METRICS have one entry a rank, separated by commas."""
    RANK_METRICS = "RLHF_RANK_METRICS"
    """Launcher of a pod of several ranks: host:port at which each of them serves its metrics and liveness to it."""
    GROUP = "RLHF_GROUP"
    INDEX = "RLHF_INDEX"
    CERTIFICATES = "RLHF_CERTIFICATES"
    """Folder with ca.crt, tls.crt, tls.key; unset means plain text (embedded tests only)."""
    METRICS = "RLHF_METRICS"
    """host:port of the Prometheus endpoint; unset means none."""
    DEVICE = "RLHF_DEVICE"
    """cpu, or cuda:N."""
    DEVICE_SHARERS = "RLHF_DEVICE_SHARERS"
    """Workers of a local run: processes that are on the same CUDA device; unset means that it has the device alone."""
    THREADS = "RLHF_THREADS"
    """CPU threads of the compute library; part of what makes a deterministic job reproducible."""
    START_TIMEOUT = "RLHF_START_TIMEOUT"
    """Workers: seconds to wait for the first welcome of the coordinator, then exit; unset means forever."""
    GRACE = "RLHF_GRACE"
    """Workers: seconds between SIGTERM and SIGKILL, for which a rank may stay; unset means that it ends at once."""
    AWAIT_WORKERS = "RLHF_AWAIT_WORKERS"
    """Coordinator: 1 waits for absent workers for ever, because the operator sees why their pods do not start. Unset:
    the job fails when a worker that it needs is absent for spec.runPolicy.startTimeoutSeconds."""
    LOG_FORMAT = "RLHF_LOG_FORMAT"
    """json for one JSON object per line; otherwise plain lines."""
    TERMINATION_MESSAGE = "RLHF_TERMINATION_MESSAGE"
    """Coordinator: file that takes its last report when the job is complete; unset means none."""


class ExitCode(IntEnum):
    """Exit codes of our processes; runPolicy's failure rules match on them."""

    OK = 0
    FAILED = 1
    """The job failed for a reason printed on the last line."""
    USAGE = 2
    """The command line or the manifest is wrong; nothing was started."""
    USER_CODE = 20
    """A reward function or endpoint kept failing."""
    BAD_MODEL = 21
    """A model folder is missing or corrupt."""
    BAD_DATA = 22
    """A prompt file is missing or has a bad line."""
    STORAGE = 23
    """A checkpoint or journal could not be written (disk full, permissions)."""
    ADDRESS_IN_USE = 24
    SAMPLE_FAILED = 25
    """A sample that no worker could decode, beyond those that rollout.maxFailedSamples allows."""
    RESTART = 75
    """The process asks to be restarted (a peer of its training group was lost); never counted against backoffLimit."""
    INTERRUPTED = 130
    """Stopped by Ctrl-C after a checkpoint."""


def lease_name(operator_class: str) -> str:
    """Return the name of the Lease of a class of operators; "" is the class of jobs that name none."""
    return f"{FIELD_MANAGER}-{operator_class}" if operator_class else FIELD_MANAGER


def worker_name(group: str, index: int | str) -> str:
    """Return the name of a worker in logs, metrics, pictures and messages, such as `generation-0`: its pod's suffix."""
    return f"{group}-{index}"
