"""Moments that are marked on all graphs of a dashboard, as Grafana's Prometheus datasource reads them.

Rule: a mark is where a query has a value above zero. Each dashboard marks its own, and the alerts that fire on what it
shows, whichever rules were installed: without any the mark is never there.
"""

from collections.abc import Iterator
from typing import Any, Final

from rlhf_observability.dashboards.panels import RED, Annotation, Dashboard, Variable
from rlhf_observability.dashboards.variables import DATASOURCE
from rlhf_observability.promql import CLUSTER, FLEET, JOBS

STEP: Final = "30s"
"""Marks that are nearer than this are one."""
_OPERATOR: Final = f'{CLUSTER}=~"$cluster",alertname=~"RLHFOperator.+"'


def annotations(dashboard: Dashboard) -> Iterator[Annotation]:
    """Yield what is marked on a dashboard."""
    yield from dashboard.annotations
    if Variable.JOB in dashboard.variables:
        chosen = ",".join((*JOBS.matchers, 'alertname=~"RLHF.+"'))
    elif Variable.NAMESPACE in dashboard.variables:
        chosen = ",".join((*FLEET.matchers, 'alertname=~"RLHF.+"'))
    else:
        chosen = _OPERATOR
    yield Annotation("Alerts", f'ALERTS{{alertstate="firing",{chosen}}}', "{{alertname}} {{rlhf_job}}", RED)


def annotation_json(annotation: Annotation) -> dict[str, Any]:
    """Return an annotation as the datasource reads it; the library's type knows but its expression."""
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
