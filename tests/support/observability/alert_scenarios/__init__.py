"""What happens to jobs and operators, and which alerts fire then: for every alert of the chart at least one of each."""

from tests.support.observability.alert_scenarios import jobs, learning, operator, storage, workers
from tests.support.observability.promtool_files import AlertScenario

SCENARIOS: tuple[AlertScenario, ...] = (
    *jobs.SCENARIOS,
    *learning.SCENARIOS,
    *workers.SCENARIOS,
    *storage.SCENARIOS,
    *operator.SCENARIOS,
)
