"""The variables above dashboards: datasource, cluster, namespace, job and worker.

Rule: each except the datasource allows several choices, and All is the default, so that a dashboard shows data before
any choice. All of `cluster` also matches series without that label.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from grafana_foundation_sdk.builders import dashboard as sdk
from grafana_foundation_sdk.models import dashboard as models

from rlhf_observability.dashboards.panels import Variable

DATASOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
ALL: Final = {Variable.CLUSTER: ".*", Variable.NAMESPACE: ".+", Variable.JOB: ".+", Variable.WORKER: ".+"}
"""Patterns of All in queries. Only a cluster may be absent."""
QUERIES: Final = {
    Variable.CLUSTER: "label_values(rlhf_build_info, cluster)",
    Variable.NAMESPACE: 'label_values(rlhf_job_phase{cluster=~"$cluster"}, namespace)',
    Variable.JOB: 'label_values(rlhf_job_phase{cluster=~"$cluster",namespace=~"$namespace"}, rlhf_job)',
    Variable.WORKER: (
        'label_values(rlhf_worker_busy_seconds_total{cluster=~"$cluster",namespace=~"$namespace",rlhf_job=~"$job"},'
        " worker)"
    ),
}
"""Query for the choices of each variable."""


def variables(wanted: Iterable[Variable]) -> Iterator[sdk.DatasourceVariable | sdk.QueryVariable]:
    """Yield the datasource and the wanted variables, each of which narrows the later ones."""
    yield (
        sdk.DatasourceVariable("datasource").label("datasource").type("prometheus").hide(models.VariableHide.DONT_HIDE)
    )
    for variable in wanted:
        everything = models.VariableOption(selected=True, text="All", value="$__all")
        yield (
            sdk.QueryVariable(variable.value)
            .label(variable.value)
            .datasource(DATASOURCE)
            .query({"query": QUERIES[variable], "refId": variable.value})
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.NATURAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(ALL[variable])
            .current(everything)
        )
