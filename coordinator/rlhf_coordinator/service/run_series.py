"""The metrics of the last finished iteration as series with their own names.

Rule: pure. A metric of the catalogue names its run metric (`run_metric`). Labels in that name have only their declared
values. Other run metrics, such as those of a user's algorithm, are values of one label, at most MAX_NAMES.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Final

from rlhf_common.metrics import labels, run
from rlhf_common.metrics.catalogue import METRICS
from rlhf_common.metrics.exposition import Values
from rlhf_common.metrics.metric import Metric

OF_RUN: Final = tuple(metric for metric in METRICS if metric.run_metric)
"""Metrics whose value is one of the last iteration's."""
MAX_NAMES: Final = labels.RUN_METRIC.limit
"""Most names of run metrics that are served as values of a label."""


def series_of_run(metrics: Mapping[str, float], models: Sequence[str]) -> Iterator[tuple[Metric, Values]]:
    """Yield every metric of an iteration that has its own name, then all metrics by their name in metrics.jsonl.

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
