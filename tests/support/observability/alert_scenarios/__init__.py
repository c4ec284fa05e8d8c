"""Scenarios of jobs and operators with the alerts that fire then: at least one for every alert of the chart."""

from tests.support.observability.alert_scenarios import jobs, learning, operator, storage, workers
from tests.support.observability.promtool_files import AlertScenario

SCENARIOS: tuple[AlertScenario, ...] = (
    *jobs.SCENARIOS,
    *learning.SCENARIOS,
    *workers.SCENARIOS,
    *storage.SCENARIOS,
    *operator.SCENARIOS,
)
