"""Dashboards of Grafana: one module per dashboard, each of panels that name metrics of the catalogue.

  panels       what a panel, a row and a dashboard are, and the kinds of panels
  drawing      how Grafana draws each kind
  variables    what a person chooses above a dashboard
  annotations  moments that are marked on its graphs
  document     the JSON that Grafana imports, panels in place
  fleet, job, learning, training, fusion, speculation, weights, engine, workers, operator
               the dashboards, each with the questions that it answers in its docstring

`all_dashboards()` is the list that tests and tools go by: of each, `uid`, `title`, `rows`, `panels`, and of each panel
`queries`, whose `expression` is PromQL with Grafana's variables ($cluster, $namespace, $job, $worker; durations
$__rate_interval, $__range). `variables.ALL` says what the variables stand for when All is chosen. `document()` returns
the JSON of one; `python -m rlhf_observability.dashboards FOLDER` (`make dashboards`) writes `FOLDER/<name>.json`, the
name being the uid without `rlhf-`.

Rule: a panel says in its description what is normal and what to do when it is not. Nothing here asks a server.
"""

from rlhf_observability.dashboards.engine import ENGINE_DASHBOARD
from rlhf_observability.dashboards.fleet import FLEET_DASHBOARD
from rlhf_observability.dashboards.fusion import FUSION_DASHBOARD
from rlhf_observability.dashboards.job import JOB_DASHBOARD
from rlhf_observability.dashboards.learning import LEARNING_DASHBOARD
from rlhf_observability.dashboards.operator import OPERATOR_DASHBOARD
from rlhf_observability.dashboards.panels import Dashboard
from rlhf_observability.dashboards.speculation import SPECULATION_DASHBOARD
from rlhf_observability.dashboards.training import TRAINING_DASHBOARD
from rlhf_observability.dashboards.weights import WEIGHTS_DASHBOARD
from rlhf_observability.dashboards.workers import WORKERS_DASHBOARD


def all_dashboards() -> tuple[Dashboard, ...]:
    """Return every dashboard, in the order in which people read about them."""
    return (
        FLEET_DASHBOARD,
        JOB_DASHBOARD,
        LEARNING_DASHBOARD,
        TRAINING_DASHBOARD,
        FUSION_DASHBOARD,
        SPECULATION_DASHBOARD,
        WEIGHTS_DASHBOARD,
        ENGINE_DASHBOARD,
        WORKERS_DASHBOARD,
        OPERATOR_DASHBOARD,
    )


def file_name(dashboard: Dashboard) -> str:
    """Return the name of a dashboard's file."""
    return f"{dashboard.uid.removeprefix('rlhf-')}.json"
