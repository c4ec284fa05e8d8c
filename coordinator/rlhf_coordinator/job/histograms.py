"""Histograms of samples, steps and iterations of a job, for percentiles."""

from typing import Final

from prometheus_client.metrics_core import Metric as Family

from rlhf_common.metrics import fusion, job, samples, storage, training
from rlhf_common.metrics.exposition import HistogramSeries, Ids
from rlhf_common.metrics.metric import Metric

_FED: Final = (
    job.ITERATION_SECONDS,
    samples.QUEUE_SECONDS,
    samples.GENERATION_SECONDS,
    samples.RESPONSE_TOKENS,
    samples.SCORING_SECONDS,
    samples.FIRST_SCORE_SECONDS,
    fusion.MIGRATION_SECONDS,
    fusion.MIGRATION_PAUSED,
    training.STEP_SECONDS,
    storage.WEIGHT_UPDATE,
    storage.WEIGHT_COPY,
    storage.WEIGHT_PAUSED,
    storage.CHECKPOINT_SECONDS,
)


class JobHistograms:
    """The histograms of one job, since its coordinator started."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._all = {metric.name: HistogramSeries(metric) for metric in _FED} if enabled else {}
        """Histograms by name of the metric; empty when metrics are disabled."""

    def observe(
        self,
        metric: Metric,
        value: float,
        *labels: str,
        iteration: int | None = None,
        worker: str = "",
        sample: int | None = None,
    ) -> None:
        """Add one value of a metric with these labels and its exemplar; nothing when metrics are disabled."""
        series = self._all.get(metric.name)
        if series is None:
            return
        ids: Ids = (("worker", worker),) if worker else ()
        if iteration is not None:
            ids += (("iteration", str(iteration)),)
        if sample is not None:
            ids += (("sample", str(sample)),)
        series.observe(value, labels, ids)

    def families(self) -> list[Family]:
        """Return the metric families for a scrape."""
        return [series.family() for series in self._all.values()]
