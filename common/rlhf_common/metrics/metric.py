"""The types of a metric and its labels. Plain data.

Rule: units are base units, as Prometheus recommends. A label has listed values, or a bound in words and a number.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import prod
from typing import Final

_NAME: Final = re.compile(r"(rlhf|process)_[a-z0-9]+(_[a-z0-9]+)*")


class MetricKind(StrEnum):
    """Metric types of Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Unit(StrEnum):
    """Unit of a value."""

    SECONDS = "seconds"
    TIMESTAMP = "seconds since 1970"
    BYTES = "bytes"
    TOKENS = "tokens"
    TOKENS_PER_SECOND = "tokens per second"
    SAMPLES = "samples"
    SAMPLES_PER_SECOND = "samples per second"
    RATIO = "ratio"
    NATS = "nats"
    REWARD = "reward"
    STATE = "0 or 1"
    NUMBER = "number"


class Server(StrEnum):
    """Kind of process whose endpoint serves a metric."""

    OPERATOR = "operator"
    COORDINATOR = "coordinator"
    WORKER = "worker"


_ENDINGS: Final = {
    Unit.SECONDS: ("_seconds",),
    Unit.TIMESTAMP: ("_timestamp_seconds", "process_start_time_seconds"),
    Unit.BYTES: ("_bytes",),
    Unit.RATIO: ("_ratio", "_share"),
}
"""Suffix of a name by unit, before `_total`."""


@dataclass(frozen=True, slots=True)
class Label:
    """One label of a metric."""

    name: str
    meaning: str
    values: tuple[str, ...] = ()
    """All values; empty: `bound` names their bound."""
    bound: str = ""
    """Bound of its values, such as "workers of the job"."""
    limit: int = 0
    """Number of values at the measured scale: 1,024 workers per job, 1,000 jobs per operator."""

    def __post_init__(self) -> None:
        if bool(self.values) == bool(self.bound) or bool(self.bound) != bool(self.limit):
            raise ValueError(f"label {self.name}: give either its values, or what bounds them and how many they are")

    @property
    def count(self) -> int:
        """Maximum number of values at the measured scale."""
        return len(self.values) or self.limit


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, with the data for exporters, dashboards, alerts and the documentation."""

    name: str
    """Name in queries: a counter with `_total`, a histogram without `_bucket`."""
    kind: MetricKind
    unit: Unit
    servers: tuple[Server, ...]
    meaning: str
    """Meaning, one sentence."""
    source: str
    """Formula or origin of the value."""
    normal: str
    """Values that a reader should expect."""
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without infinity."""
    absent: str = ""
    """When there is no series, if that needs an explanation."""
    run_metric: str = ""
    """Name of the same number in metrics.jsonl and TensorBoard; `{model}` and similar stand for a label."""
    one_a_set: bool = False
    """Whether only one value of its last label has a series at a time, such as the phase of a job."""

    def __post_init__(self) -> None:
        stem = self.name.removesuffix("_total")
        problem = ""
        if not _NAME.fullmatch(self.name):
            problem = "must be words in lower case, joined by _, after rlhf_"
        elif (self.kind is MetricKind.COUNTER) != self.name.endswith("_total"):
            problem = "must end in _total if it is a counter, and only then"
        elif not stem.endswith(_ENDINGS.get(self.unit, ("",))):
            problem = f"must name its unit, {self.unit}, at its end"
        elif bool(self.buckets) != (self.kind is MetricKind.HISTOGRAM) or list(self.buckets) != sorted(
            set(self.buckets)
        ):
            problem = "must have rising buckets if it is a histogram, and only then"
        elif not self.meaning.endswith(".") or not self.source or not self.normal:
            problem = "must have a meaning that is a sentence, a source, and what is normal"
        if problem:
            raise ValueError(f"metric {self.name}: {problem}")

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of its labels, in order."""
        return tuple(label.name for label in self.labels)

    @property
    def series(self) -> int:
        """Maximum number of series of one process at the measured scale; a histogram has one per bucket and three."""
        labels = self.labels[:-1] if self.one_a_set else self.labels
        sets = prod(label.count for label in labels)
        return sets * (len(self.buckets) + 3 if self.kind is MetricKind.HISTOGRAM else 1)

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Names of its series in a query."""
        if self.kind is MetricKind.HISTOGRAM:
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)


coordinator_gauge: Final = partial(Metric, kind=MetricKind.GAUGE, servers=(Server.COORDINATOR,))
coordinator_counter: Final = partial(Metric, kind=MetricKind.COUNTER, servers=(Server.COORDINATOR,))
coordinator_histogram: Final = partial(Metric, kind=MetricKind.HISTOGRAM, servers=(Server.COORDINATOR,))
