"""All metrics of the project, by name.

Rule: a metric belongs to it if a module of `MODULES` declares it as a constant.
"""

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Final

from rlhf_common.metrics import (
    fusion,
    job,
    operator,
    process,
    run,
    samples,
    speculation,
    storage,
    training,
    worker,
    worker_drafts,
)
from rlhf_common.metrics.metric import Metric, Server

MODULES: Final[tuple[ModuleType, ...]] = (
    operator,
    job,
    samples,
    run,
    fusion,
    speculation,
    training,
    storage,
    worker,
    worker_drafts,
    process,
)
"""Modules in reading order."""


def _declared() -> Iterator[Metric]:
    for module in MODULES:
        yield from declared_in(module)


def declared_in(module: ModuleType) -> Iterator[Metric]:
    """Yield the metrics that a module declares, in its order."""
    return (value for value in vars(module).values() if isinstance(value, Metric))


METRICS: Final[tuple[Metric, ...]] = tuple(_declared())
BY_NAME: Final[Mapping[str, Metric]] = {metric.name: metric for metric in METRICS}
if len(BY_NAME) != len(METRICS):
    raise ValueError("two metrics have one name")


def served_by(server: Server) -> tuple[Metric, ...]:
    """Return the metrics of one kind of process."""
    return tuple(metric for metric in METRICS if server in metric.servers)
