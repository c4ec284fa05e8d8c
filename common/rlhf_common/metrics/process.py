"""Metrics of any process of the project.

Rule: metrics that begin with `process_` are read from the kernel at a scrape, under the names of Prometheus's client
libraries.
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
    "one version for the operator, and for all processes of a job but while it is upgraded",
    (labels.VERSION,),
)
RESIDENT_MEMORY: Final = Metric(
    "process_resident_memory_bytes",
    MetricKind.GAUGE,
    Unit.BYTES,
    _EVERY,
    "Memory that the process occupies.",
    "VmRSS in /proc/self/stat",
    "flat after the first iterations; a coordinator below 1 GB, an operator with 1,000 jobs below 200 MB",
)
VIRTUAL_MEMORY: Final = Metric(
    "process_virtual_memory_bytes",
    MetricKind.GAUGE,
    Unit.BYTES,
    _EVERY,
    "Address space of the process.",
    "/proc/self/stat",
    "of no meaning by itself; with CUDA tens of gigabytes",
)
CPU_SECONDS: Final = Metric(
    "process_cpu_seconds_total",
    MetricKind.COUNTER,
    Unit.SECONDS,
    _EVERY,
    "Processor time of the process, user and system.",
    "/proc/self/stat",
    "a coordinator and an operator below one core",
)
START_TIME: Final = Metric(
    "process_start_time_seconds",
    MetricKind.GAUGE,
    Unit.TIMESTAMP,
    _EVERY,
    "When the process started.",
    "/proc/self/stat",
    "changes when the process restarts",
)
OPEN_FILES: Final = Metric(
    "process_open_fds",
    MetricKind.GAUGE,
    Unit.NUMBER,
    _EVERY,
    "Open file descriptors.",
    "/proc/self/fd",
    "far below process_max_fds; a coordinator has about one a worker",
)
MAX_FILES: Final = Metric(
    "process_max_fds",
    MetricKind.GAUGE,
    Unit.NUMBER,
    _EVERY,
    "File descriptors that the process may have open.",
    "the soft limit RLIMIT_NOFILE",
    "constant",
)
CERTIFICATE_EXPIRY: Final = Metric(
    "rlhf_certificate_expiry_timestamp_seconds",
    MetricKind.GAUGE,
    Unit.TIMESTAMP,
    (Server.COORDINATOR, Server.WORKER),
    "Expiry time of the process's certificate within its job.",
    "notAfter of tls.crt in RLHF_CERTIFICATES, read again when the file changes",
    "days ahead: the operator renews it long before",
    absent="the process runs without certificates",
)
