"""Draft choices of one worker's engine.

The coordinator serves the results of drafts for all workers of a job (`speculation`).
"""

from functools import partial
from typing import Final

from rlhf_common.metrics import labels
from rlhf_common.metrics.metric import Metric, MetricKind, Server, Unit

_OWN: Final = (labels.OWN_WORKER, labels.OWN_GROUP)
_counter = partial(
    Metric,
    kind=MetricKind.COUNTER,
    servers=(Server.WORKER,),
    absent="the worker does not generate, or its engine decodes token by token",
)

BUDGETS: Final = _counter(
    "rlhf_engine_draft_budget_steps_total",
    unit=Unit.NUMBER,
    meaning="Decode steps by the mean number of drafted tokens per sample. 0 is a plain step; 8 means more than 4.",
    source="the decision in every step",
    normal="0 at large batches, more in the tail",
    labels=(*_OWN, labels.DRAFT_BUDGET),
)
REASONS: Final = _counter(
    "rlhf_engine_draft_reason_steps_total",
    unit=Unit.NUMBER,
    meaning="Decode steps by the reason for which they drafted or did not.",
    source="the decision in every step",
    normal="Faster or Slower; Probe in a few percent of steps; Fixed if the manifest sets the length",
    labels=(*_OWN, labels.DRAFT_REASON),
)
