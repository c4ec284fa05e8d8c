"""Reports in the conditions that requests to the API server fail and end a job's reconciles early. Rule: pure."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from rlhf_common.conditions import ConditionType
from rlhf_operator.reconcile.conditions import StoredConditions, merged, shortened, written
from rlhf_operator.reconcile.reconcile_plan import ReconcilePlan
from rlhf_operator.untrusted import clean

Json = dict[str, Any]

WORDS_MAX: Final = 600
"""Maximum characters of the API server's message that are quoted."""
LEAD: Final = "the API server does not do what the operator asks ("
TAIL: Final = "the operator tries again every minute"
"""First and last words of the sentence."""
WEBHOOK: Final = "failed calling webhook"
"""Text in the error of an API server that cannot reach an admission webhook."""
NOT_DECLARED: Final = "field not declared in schema"
"""Text in the error of an API server whose definition of RLHFJobs lacks a field."""


def describe_failure(words: str, namespace: str) -> str:
    """Return the sentence about a failed request, with a remedy if one is known."""
    remedy = ""
    if WEBHOOK in words:
        remedy = (
            "see that the Service of that webhook has a pod that answers, or leave out "
            f"namespace {namespace} in its namespaceSelector; "
        )
    return f"{LEAD}{shortened(' '.join(clean(words).split()), WORDS_MAX)}): {remedy}{TAIL}"


def tell(plan: ReconcilePlan, stored: Mapping[str, Any], failure: str) -> ReconcilePlan:
    """Return the plan with `failure` at the start of Running's message; without such a sentence if it is empty."""
    before: Mapping[str, Any] = stored.get("status") or {}
    status = before if plan.status is None else plan.status
    entries = status.get("conditions") or []
    changed = [
        {**entry, "message": _message(failure, str(entry["message"]))}
        if entry["type"] == ConditionType.RUNNING
        else entry
        for entry in entries
    ]
    if changed == entries and plan.status is None:
        return plan
    result = {**status, "conditions": changed}
    return replace(plan, status=None if result == before else result)


def first_status(stored: Mapping[str, Any], now: datetime) -> Json:
    """Return the first status of a job."""
    return {
        "conditions": written(merged(StoredConditions.from_status({}), [], now, stored["metadata"].get("generation")))
    }


def _message(failure: str, message: str) -> str:
    rest = message
    if message.startswith(LEAD):
        rest = message.partition(f"{TAIL}. ")[2]
    return shortened(". ".join(part for part in (failure, rest) if part))
