"""Marked moments on all graphs of a dashboard, in the form of Grafana's Prometheus datasource.

Rule: a dashboard may have its own marks, and has those of firing alerts on its jobs or operators.
"""

from collections.abc import Iterator
from typing import Any, Final

from rlhf_observability.dashboards.panels import RED, Annotation, Dashboard, Variable
from rlhf_observability.dashboards.variables import DATASOURCE
from rlhf_observability.promql import CLUSTER, FLEET, JOBS

STEP: Final = "30s"
"""Step of the queries for marks."""
_OPERATOR: Final = f'{CLUSTER}=~"$cluster",alertname=~"RLHFOperator.+"'


def annotations(dashboard: Dashboard) -> Iterator[Annotation]:
    """Yield the annotations of a dashboard, that of alerts last."""
    yield from dashboard.annotations
    if Variable.JOB in dashboard.variables:
        chosen = ",".join((*JOBS.matchers, 'alertname=~"RLHF.+"'))
    elif Variable.NAMESPACE in dashboard.variables:
        chosen = ",".join((*FLEET.matchers, 'alertname=~"RLHF.+"'))
    else:
        chosen = _OPERATOR
    yield Annotation("Alerts", f'ALERTS{{alertstate="firing",{chosen}}}', "{{alertname}} {{rlhf_job}}", RED)


def annotation_json(annotation: Annotation) -> dict[str, Any]:
    """Return an annotation in the datasource's form."""
    return {
        "datasource": DATASOURCE.to_json(),
        "enable": annotation.enabled,
        "expr": annotation.expression,
        "hide": False,
        "iconColor": annotation.colour,
        "name": annotation.name,
        "step": STEP,
        "titleFormat": annotation.title,
    }
