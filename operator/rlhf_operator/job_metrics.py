"""Prometheus metrics of jobs, produced on each scrape from two small tuples per job, to save memory.

Labels and help come from `rlhf_common.metrics.operator`.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rlhf_common.metrics import operator
from rlhf_common.metrics.catalogue import BY_NAME, declared_in
from rlhf_common.metrics.exposition import Values, family
from rlhf_common.metrics.labels import JOB
from rlhf_common.metrics.metric import Metric

JobValues = Mapping[Metric, Values]
"""Metric -> values of the labels after namespace and rlhf_job -> value."""
_Series = tuple[tuple[str, tuple[tuple[tuple[str, ...], float], ...]], ...]

JOB_METRICS: Final = tuple(metric for metric in declared_in(operator) if metric.labels[: len(JOB)] == JOB)
"""The catalogue's metrics of the operator whose first labels are those of a job."""


class JobSeries(Collector):
    """The series of all jobs."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[_Series, _Series]] = {}

    def show(self, key: str, shared: JobValues, own: JobValues) -> None:
        """Set the current values of the job `namespace/name`. `shared`: values that other jobs can have too; `own`: the
        rest.
        """
        self._jobs[key] = _same(_series(shared)), _series(own)

    def forget(self, key: str) -> None:
        """Drop the series of a deleted job."""
        self._jobs.pop(key, None)

    def describe(self) -> Iterable[Family]:
        """Return the metrics without values."""
        return [family(metric, {}) for metric in JOB_METRICS]

    def collect(self) -> Iterator[Family]:
        """Yield all metrics; may run in another thread than `show`."""
        values: dict[str, dict[tuple[str, ...], float]] = {metric.name: {} for metric in JOB_METRICS}
        for key, parts in list(self._jobs.items()):
            namespace, _, name = key.partition("/")
            for part in parts:
                for metric, items in part:
                    into = values[metric]
                    for labels, value in items:
                        into[namespace, name, *labels] = value
        for served in JOB_METRICS:
            yield family(served, values[served.name])

    def page(self) -> bytes:
        """Return the metrics as Prometheus text."""
        lines = {metric.name: [_head(metric)] for metric in JOB_METRICS}
        for key, parts in list(self._jobs.items()):
            namespace, _, name = key.partition("/")
            place = f'namespace="{_escaped(namespace)}",rlhf_job="{_escaped(name)}"'
            for part in parts:
                for metric, items in part:
                    begin = f"{metric}{{{place}"
                    lines[metric] += [f"{begin}{_labels(metric, labels)}}} {value!r}\n" for labels, value in items]
        return "".join(line for each in lines.values() for line in each).encode()


def _head(metric: Metric) -> str:
    return f"# HELP {metric.name} {metric.meaning}\n# TYPE {metric.name} {metric.kind}\n"


@lru_cache(maxsize=4096)
def _labels(metric: str, values: tuple[str, ...]) -> str:
    """Return the labels after namespace and rlhf_job as text."""
    names = BY_NAME[metric].label_names[len(JOB) :]
    return "".join(f',{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _series(values: JobValues) -> _Series:
    return tuple((metric.name, tuple(each.items())) for metric, each in values.items())


@lru_cache(maxsize=4096)
def _same(series: _Series) -> _Series:
    return series
