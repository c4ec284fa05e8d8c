"""Dashboards of Grafana: one module per dashboard, with panels over metrics of the catalogue.

  panels       types of panels, rows and dashboards, and the kinds of panels
  drawing      how Grafana draws each kind
  variables    choices above a dashboard
  annotations  marked moments on its graphs
  document     the JSON that Grafana imports, panels in place
  fleet, job, learning, training, fusion, speculation, weights, engine, workers, operator
               the dashboards, each with the questions that it answers in its docstring

Rule: a panel's description says what is normal and what to do otherwise.
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
    """Return every dashboard, in reading order."""
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
