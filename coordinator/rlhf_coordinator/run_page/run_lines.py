"""Parses lines of a run's files for the page: spans, marks, iterations, histories, rows of sample tables.

A line is untrusted: an invalid one gives None.
"""

import math
from typing import Any, Final

from pydantic import ValidationError

from rlhf_common.json_document import parse_json
from rlhf_common.names import Group
from rlhf_coordinator.reports.sample_histories import SampleHistories
from rlhf_coordinator.reports.sample_table import SampleRow
from rlhf_coordinator.reports.trackers.metrics_jsonl import is_evaluation

MAX_NAME: Final = 200
MAX_WORDS: Final = 2000
MAX_ATTRIBUTES: Final = 24
MAX_TEXT: Final = 4000
"""Longest prompt or response on the page, in characters."""
STAGES: Final = "stage/"
_GROUPS: Final = tuple(group.value for group in Group)
SHOWN_METRICS: Final = {
    "reward": "reward",
    "kl": "kl",
    "kl_per_token": "kl_per_token",
    "seconds": "seconds/iteration",
    "samples_per_second": "samples_per_second",
    "tokens_per_second": "tokens_per_second",
    "response_tokens": "response_tokens_mean",
    "loss": "training/actor/loss",
    "long_round": "rollout/long_round",
    "sorted_batch": "rollout/sorted_batch",
}
"""Name on the page -> metric of an iteration."""


def timeline_event(line: bytes) -> tuple[str, list[Any]] | None:
    """Parse a timeline line into a span or a mark, with times in milliseconds since the Unix epoch.

    Return ("spans", [worker, name, start, milliseconds, iteration, attributes]) or ("marks", [at, kind, words]), or
    None.
    """
    event = _object(line.rstrip(b",\r "))
    if event is None:
        return None
    start, name, arguments = _number(event.get("ts")), _text(event.get("name"), MAX_NAME), event.get("args")
    if start is None or not name or not isinstance(arguments, dict):
        return None
    if event.get("ph") == "i":
        return "marks", [start / 1000, name, _text(arguments.get("message"), MAX_WORDS)]
    length = _number(event.get("dur"))
    worker = _worker(event.get("pid"), event.get("tid"))
    if event.get("ph") != "X" or length is None or length < 0 or not worker:
        return None
    attributes = {
        key[:MAX_NAME]: value
        for key, argument in list(arguments.items())[:MAX_ATTRIBUTES]
        if key != "iteration" and (value := _text(argument, MAX_NAME))
    }
    iteration = _number(arguments.get("iteration"))
    return "spans", [worker, name, start / 1000, length / 1000, int(iteration or 0), attributes]


def iteration_of(line: bytes) -> dict[str, Any] | None:
    """Return an iteration's entry in the list of iterations; None for an invalid line, or that of an evaluation."""
    metrics = _object(line)
    if metrics is None or is_evaluation(metrics):
        return None
    iteration, ended = _number(metrics.get("iteration")), _number(metrics.get("time_ns"))
    if iteration is None or ended is None:
        return None
    shown = {name: _number(metrics.get(metric)) for name, metric in SHOWN_METRICS.items()}
    stages = {
        name.removeprefix(STAGES)[:MAX_NAME]: value
        for name, raw in metrics.items()
        if name.startswith(STAGES) and (value := _number(raw))
    }
    return {"iteration": int(iteration), "end": ended / 1e6, **shown, "stages": stages}


def histories_of(line: bytes) -> dict[str, Any] | None:
    """Return the history of each sample of an iteration; None for an invalid line."""
    try:
        return SampleHistories.model_validate_json(line).model_dump(exclude={"version"})
    except ValidationError:
        return None


def row_of(row: SampleRow) -> dict[str, Any]:
    """Return a row of a sample table, with its texts cut to the page's limit."""
    return {
        "sample": row.sample,
        "group": row.group,
        "prompt": row.prompt[:MAX_TEXT],
        "response": row.response[:MAX_TEXT],
        "tokens": row.response_tokens,
        "finish": "failed" if row.failed else row.finish_reason[:MAX_NAME],
        "reward": _number(row.reward),
        "shaped_reward": _number(row.shaped_reward),
        "rewards": {name[:MAX_NAME]: _number(value) for name, value in list(row.rewards.items())[:MAX_ATTRIBUTES]},
        "advantage": _number(row.advantage),
        "workers": [worker[:MAX_NAME] for worker in row.workers[:MAX_ATTRIBUTES]],
        "versions": [list(pair) for pair in row.weight_versions[:MAX_ATTRIBUTES]],
        "drafted": row.drafted_tokens,
        "accepted": row.accepted_tokens,
        "cut": row.cut or max(len(row.prompt), len(row.response)) > MAX_TEXT,
    }


def _worker(process: Any, thread: Any) -> str:
    """Return the name of a timeline row from its numbers; empty for invalid ones.

    The number after those of the groups stands for a rank's predicted schedule.
    """
    if not isinstance(process, int) or not isinstance(thread, int) or not 0 <= process <= len(_GROUPS):
        return ""
    if process == len(_GROUPS):
        return f"predicted-{thread}"
    group = _GROUPS[process]
    return group if group == Group.COORDINATOR.value else f"{group}-{thread}"


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or not math.isfinite(value):
        return None
    return value


def _text(value: Any, most: int) -> str:
    return str(value)[:most] if isinstance(value, str | int | float) else ""
