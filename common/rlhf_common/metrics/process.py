"""Metrics of several kinds of processes.

Rule: metrics that begin with `process_` have the names of Prometheus's client libraries.
"""

from typing import Final

from rlhf_common.metrics import labels
from rlhf_common.metrics.metric import Metric, MetricKind, Server, Unit

_EVERY: Final = (Server.OPERATOR, Server.COORDINATOR, Server.WORKER)

BUILD_INFO: Final = Metric(
    "rlhf_build_info",
    MetricKind.GAUGE,
    Unit.STATE,
    _EVERY,
    "Always 1; the label is the version of the package.",
    "the installed package",
    "one version for the operator, and one for all processes of a job, except during an upgrade",
    (labels.VERSION,),
)
RESIDENT_MEMORY: Final = Metric(
    "process_resident_memory_bytes",
    MetricKind.GAUGE,
    Unit.BYTES,
    _EVERY,
    "Resident memory of the process.",
    "resident pages in /proc/self/stat",
    "constant after the first iterations; a coordinator below 1 GB, an operator with 1,000 jobs below 200 MB",
)
VIRTUAL_MEMORY: Final = Metric(
    "process_virtual_memory_bytes",
    MetricKind.GAUGE,
    Unit.BYTES,
    _EVERY,
    "Size of the address space of the process.",
    "/proc/self/stat",
    "any value; with CUDA tens of gigabytes",
)
CPU_SECONDS: Final = Metric(
    "process_cpu_seconds_total",
    MetricKind.COUNTER,
    Unit.SECONDS,
    _EVERY,
    "CPU time of the process, user and system.",
    "/proc/self/stat",
    "a coordinator or an operator uses less than one core",
)
START_TIME: Final = Metric(
    "process_start_time_seconds",
    MetricKind.GAUGE,
    Unit.TIMESTAMP,
    _EVERY,
    "Start time of the process.",
    "/proc/self/stat",
    "changes when the process restarts",
)
OPEN_FILES: Final = Metric(
    "process_open_fds",
    MetricKind.GAUGE,
    Unit.NUMBER,
    _EVERY,
    "Number of open file descriptors.",
    "/proc/self/fd",
    "far below process_max_fds; a coordinator has about one per worker",
)
MAX_FILES: Final = Metric(
    "process_max_fds",
    MetricKind.GAUGE,
    Unit.NUMBER,
    _EVERY,
    "Maximum number of open file descriptors of the process.",
    "the soft limit RLIMIT_NOFILE",
    "constant",
)
CERTIFICATE_EXPIRY: Final = Metric(
    "rlhf_certificate_expiry_timestamp_seconds",
    MetricKind.GAUGE,
    Unit.TIMESTAMP,
    (Server.COORDINATOR, Server.WORKER),
    "Expiry time of the certificate that the process uses in its job.",
    "notAfter of tls.crt in RLHF_CERTIFICATES, read again when the file changes",
    "days ahead, because the operator renews it long before",
    absent="the process runs without certificates",
)
