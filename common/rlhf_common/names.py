"""Names that several processes must agree on, such as API group, labels, ports, environment and exit codes."""

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
"""Annotation of a pod: hash of the templates and settings from which it was created."""
FINALIZER: Final = "rlhf.dev/checkpoint"
"""Finalizer of an unfinished job whose spec.checkpoints.onDeletion is Save; it delays the deletion for a last
checkpoint."""

COORDINATOR_PORT: Final = 7700
"""gRPC port of a job's coordinator inside its pod."""
WORKER_PORT: Final = 7710
"""First gRPC port of a worker's pod, for its peers (weights, KV caches)."""
METRICS_PORT: Final = 7790
"""Prometheus port of the pods of coordinator and workers."""
RANK_METRICS_PORT: Final = 7800
"""In a pod with several ranks: first rank's port for metrics and liveness, read by the launcher; later ranks use the
following ports.
"""
RANK_RENDEZVOUS_PORT: Final = 7900
"""In a pod with several ranks: first rank's rendezvous port; later ranks use the following ports."""

DRAFT_MODEL: Final = "draft"
"""Name of the draft model in place of a role, as in transfers and checkpoints. It is not a role of any algorithm."""
DRAFT_MODEL_FIELD: Final = "spec.generation.speculation.draftModel.path"
"""Manifest path of the draft model."""

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
"""Weight file of a PEFT folder; `ADAPTER_CONFIG` describes it."""
ADAPTER_FIELD: Final = "spec.training.lora.adapter"
"""Manifest path of the initial adapters."""

DEVICE_TURN_SPANS: Final = ("offload/", "onload/")
"""Prefixes of spans in which a role releases its device or takes it."""


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
    """Environment variables of a job's processes, which carry their settings and location."""

    JOB_FILE = "RLHF_JOB_FILE"
    """Coordinator: path of the resolved RLHFJob (YAML or JSON)."""
    RUN_DIR = "RLHF_RUN_DIR"
    """Coordinator: folder for journal, metrics.jsonl, events, timeline."""
    RESUME = "RLHF_RESUME"
    """Coordinator: 1 lets a new journal start from the newest checkpoint; it has no effect on an existing journal."""
    COORDINATOR = "RLHF_COORDINATOR"
    """Workers: host:port of the coordinator."""
    LISTEN = "RLHF_LISTEN"
    """host:port to which this process's own gRPC server binds."""
    ADVERTISE = "RLHF_ADVERTISE"
    """host:port at which peers reach this process's gRPC server."""
    RENDEZVOUS = "RLHF_RENDEZVOUS"
    """Training ranks: host at which the other ranks reach this one."""
    RENDEZVOUS_PORT = "RLHF_RENDEZVOUS_PORT"
    """Training ranks: port of this rank's rendezvous store. Unset: a free port, picked at the start."""
    RANKS = "RLHF_RANKS"
    """Launcher of a pod with several ranks: their number. RLHF_INDEX is then the pod's; LISTEN, ADVERTISE, DEVICE,
    RENDEZVOUS_PORT and RANK_METRICS have one entry per rank, separated by commas.
    """
    RANK_METRICS = "RLHF_RANK_METRICS"
    """Launcher of a pod with several ranks: host:port on which each rank serves metrics and liveness to it."""
    GROUP = "RLHF_GROUP"
    INDEX = "RLHF_INDEX"
    CERTIFICATES = "RLHF_CERTIFICATES"
    """Folder with ca.crt, tls.crt, tls.key; unset means plain text."""
    METRICS = "RLHF_METRICS"
    """host:port of the Prometheus endpoint; unset means none."""
    DEVICE = "RLHF_DEVICE"
    """cpu, or cuda:N."""
    DEVICE_SHARERS = "RLHF_DEVICE_SHARERS"
    """Workers of a local run: number of processes on the same CUDA device; unset means one."""
    THREADS = "RLHF_THREADS"
    """CPU threads of the compute library; a deterministic job needs the same number to reproduce its results."""
    START_TIMEOUT = "RLHF_START_TIMEOUT"
    """Workers: seconds without a first Welcome after which they exit; unset means never. An answer of an incompatible
    coordinator restarts the wait.
    """
    GRACE = "RLHF_GRACE"
    """Workers: seconds between SIGTERM and SIGKILL, during which a rank may stay; unset means that it does not stay."""
    AWAIT_WORKERS = "RLHF_AWAIT_WORKERS"
    """Coordinator: 1 waits for absent workers forever. Unset: the job fails if a needed worker is absent for
    spec.runPolicy.startTimeoutSeconds.
    """
    LOG_FORMAT = "RLHF_LOG_FORMAT"
    """json for one JSON object per line; otherwise plain lines."""
    TERMINATION_MESSAGE = "RLHF_TERMINATION_MESSAGE"
    """Coordinator: file for its last report when the job is complete; unset means none."""


class ExitCode(IntEnum):
    """Exit codes of this project's processes. Failure rules of runPolicy match those of failures."""

    OK = 0
    FAILED = 1
    """The job or the command failed."""
    USAGE = 2
    """The command line, the environment or the manifest is wrong."""
    USER_CODE = 20
    """A reward function, an environment or a reward's endpoint cannot be used, or failed repeatedly."""
    BAD_MODEL = 21
    """A model folder is missing, corrupt or unsuitable."""
    BAD_DATA = 22
    """The prompts or their chat template cannot be used."""
    STORAGE = 23
    """A checkpoint, a journal or another file could not be written or read (disk full, permissions)."""
    ADDRESS_IN_USE = 24
    SAMPLE_FAILED = 25
    """No worker could decode a sample, and more samples failed than rollout.maxFailedSamples allows."""
    RESTART = 75
    """The process requests a restart, for example because a peer of its training group was lost. This is not a failure.
    """
    INTERRUPTED = 130
    """Stopped by Ctrl-C or a signal."""


def lease_name(operator_class: str) -> str:
    """Return the name of the Lease of an operator class; "" is the class of jobs without one."""
    return f"{FIELD_MANAGER}-{operator_class}" if operator_class else FIELD_MANAGER


def worker_name(group: str, index: int | str) -> str:
    """Return the name of a worker in logs, metrics, pictures and messages, such as `generation-0`."""
    return f"{group}-{index}"
