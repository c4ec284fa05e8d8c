"""All alerts by family; a family has a page of runbooks and a group of rules."""

from typing import Final

from rlhf_observability.alerts.alert import Family
from rlhf_observability.alerts.families.jobs import JOBS
from rlhf_observability.alerts.families.learning import LEARNING
from rlhf_observability.alerts.families.operator import OPERATOR
from rlhf_observability.alerts.families.storage import STORAGE
from rlhf_observability.alerts.families.workers import WORKERS

FAMILIES: Final[tuple[Family, ...]] = (JOBS, LEARNING, WORKERS, STORAGE, OPERATOR)
"""Families in the order of the rule file."""
