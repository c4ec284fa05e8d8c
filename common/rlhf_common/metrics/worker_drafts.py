"""Draft choices of one worker's engine. Rule: they end with the worker's process, as in `worker`.

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
    meaning="Steps by how many tokens were drafted for a sample, on average; 0 is a plain step, 8 is more than 4.",
    source="the choice of every step",
    normal="0 at large batches, more in the tail",
    labels=(*_OWN, labels.DRAFT_BUDGET),
)
REASONS: Final = _counter(
    "rlhf_engine_draft_reason_steps_total",
    unit=Unit.NUMBER,
    meaning="Steps by why they drafted or did not.",
    source="the choice of every step",
    normal="Faster or Slower; Probe a few in a hundred; Fixed where the manifest fixes the length",
    labels=(*_OWN, labels.DRAFT_REASON),
)
