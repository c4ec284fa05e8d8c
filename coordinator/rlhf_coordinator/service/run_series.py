"""The metrics of an iteration as series with their own names. Rule: pure.

The first MAX_NAMES run metrics are also values of one label.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Final

from rlhf_common.metrics import labels, run
from rlhf_common.metrics.catalogue import METRICS
from rlhf_common.metrics.exposition import Values
from rlhf_common.metrics.metric import Metric

OF_RUN: Final = tuple(metric for metric in METRICS if metric.run_metric)
"""Metrics whose value is that of a run metric."""
MAX_NAMES: Final = labels.RUN_METRIC.limit
"""Most names of run metrics that are served as values of a label."""


def series_of_run(metrics: Mapping[str, float], models: Sequence[str]) -> Iterator[tuple[Metric, Values]]:
    """Yield the metrics of OF_RUN with their values, then the first MAX_NAMES of `metrics` by their name.

    `models`: roles of the trained models.
    """
    for metric in OF_RUN:
        choices = [models if label is labels.MODEL else label.values for label in metric.labels]
        values = {}
        for chosen in product(*choices):
            name = metric.run_metric.format(**dict(zip(metric.label_names, chosen, strict=True)))
            if name in metrics:
                values[chosen] = metrics[name]
        yield metric, values
    yield run.ITERATION_METRIC, {(name,): value for name, value in islice(metrics.items(), MAX_NAMES)}
