"""The metrics of the last finished iteration as series of names of their own.

Rule: pure. A metric of the catalogue says which run metric it is (`run_metric`); labels in that name take the values
that they may have and no others, so a user's algorithm cannot make up series.
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
"""Names of run metrics that are served as values of a label."""


def series_of_run(metrics: Mapping[str, float], models: Sequence[str]) -> Iterator[tuple[Metric, Values]]:
    """Yield every metric of an iteration that has a name of its own, then all of them by the name in metrics.jsonl.
    `models`: roles that are trained."""
    for metric in OF_RUN:
        choices = [models if label is labels.MODEL else label.values for label in metric.labels]
        values = {}
        for chosen in product(*choices):
            name = metric.run_metric.format(**dict(zip(metric.label_names, chosen, strict=True)))
            if name in metrics:
                values[chosen] = metrics[name]
        yield metric, values
    yield run.ITERATION_METRIC, {(name,): value for name, value in islice(metrics.items(), MAX_NAMES)}
