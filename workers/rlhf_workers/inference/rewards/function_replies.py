"""Replies of a reward function's child process to the values that the function returned.

Rule: a reward is a finite number or None, alone or in a mapping with metrics. No third-party package is imported,
because the child imports this module.
"""

import numbers
from collections.abc import Mapping
from typing import Any

from rlhf_workers.user_code.returned_values import finite, shown
from rlhf_workers.user_code.user_host import hide


def reply_of(request: dict[str, Any], value: Any, secrets: list[str]) -> dict[str, Any]:
    """Return the reply for a returned value: rewards, or a failure that shows the value."""
    number, count = request["id"], len(request["samples"])
    values = [value]
    if request["many"]:
        try:
            values = [*value]
        except TypeError:
            return _invalid(secrets, number, value, f"given {count} responses it must return a list of as many rewards")
        if len(values) != count:
            return _invalid(secrets, number, value, f"{len(values)} rewards for {count} responses")
    rewards = []
    for each in values:
        judged = each if isinstance(each, Mapping) and "reward" in each else {"reward": each}
        reward, wrong = _number(judged["reward"])
        if wrong:
            return _invalid(secrets, number, each, wrong)
        metrics = judged.get("metrics") or {}
        if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
            return _invalid(secrets, number, each, "metrics must be a mapping of names to numbers")
        beside = {hide(name, secrets): _number(metric)[0] for name, metric in metrics.items()}
        if bad := [name for name, metric in beside.items() if metric is None]:
            return _invalid(secrets, number, each, f"metric {bad[0][:60]} must be a finite number")
        rewards.append({"reward": reward, "metrics": beside})
    return {"id": number, "rewards": rewards}


def _number(value: Any) -> tuple[float | None, str]:
    """Return (number, problem); None is a missing number."""
    if value is None:
        return None, ""
    if not isinstance(value, numbers.Real):
        return None, "it must return a number, or None to abstain"
    number = finite(value)
    return number, "" if number is not None else "a reward must be finite, or None to abstain"


def _invalid(secrets: list[str], number: int, value: Any, problem: str) -> dict[str, Any]:
    message = f"the function returned {shown(value, secrets)}; {problem}"
    return {"id": number, "reason": "RewardInvalid", "message": message}
