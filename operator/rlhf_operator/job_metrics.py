"""What Prometheus is told of every job: made when it asks, from one small tuple a job.

Rule: nothing of a job is kept as a metric object, of which each costs a kilobyte: a job has a dozen series, and a
cluster thousands of jobs. Jobs in the same state share one tuple. Gone when the job goes.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Values = Mapping[tuple[str, ...], float]
"""Labels after namespace and name -> value."""
_Series = tuple[tuple[str, tuple[tuple[tuple[str, ...], float], ...]], ...]

CONDITION: Final = "rlhf_job_condition"
PODS: Final = "rlhf_job_group_pods"
RESTARTS: Final = "rlhf_job_restarts_total"
POOL: Final = "rlhf_pool_replicas"
THRESHOLD: Final = "rlhf_pool_threshold"
WANTED: Final = "rlhf_pool_desired_replicas"
STREAMS: Final = "rlhf_controlplane_streams"

_FAMILIES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    CONDITION: ("1 for the status that each condition has.", ("condition", "status")),
    PODS: ("Pods by group and phase.", ("group", "phase")),
    RESTARTS: ("Ends that were counted, as in status.restarts.", ("reason",)),
    POOL: ("Workers in the migration pool.", ()),
    THRESHOLD: ("Unfinished samples at which the tail moves.", ()),
    WANTED: ("Workers wanted, by group.", ("group",)),
    STREAMS: ("Workers that hold a session with their job's coordinator.", ()),
}
"""Name -> (help, labels after namespace and name)."""


class JobSeries(Collector):
    """The series of all jobs."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Series] = {}

    def show(self, key: str, values: Mapping[str, Values]) -> None:
        """Set what is true of the job `namespace/name` now, by name of the metric."""
        self._jobs[key] = _same(tuple((name, tuple(each.items())) for name, each in values.items()))

    def forget(self, key: str) -> None:
        """Drop the series of a job that is gone."""
        self._jobs.pop(key, None)

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values."""
        return _families().values()

    def collect(self) -> Iterator[Metric]:
        """Yield all of it; may run in another thread than `show`."""
        result = _families()
        for key, series in list(self._jobs.items()):
            place = tuple(key.split("/", 1))
            for name, values in series:
                for labels, value in values:
                    result[name].add_metric((*place, *labels), value)
        yield from result.values()


def _families() -> dict[str, GaugeMetricFamily]:
    return {
        name: GaugeMetricFamily(name, help_text, labels=("namespace", "name", *labels))
        for name, (help_text, labels) in _FAMILIES.items()
    }


@lru_cache(maxsize=4096)
def _same(series: _Series) -> _Series:
    return series
