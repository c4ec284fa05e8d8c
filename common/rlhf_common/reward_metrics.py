"""Metrics that a reward returns besides its value: allowed names, and the maximum number. Pure."""

import re
from collections.abc import Mapping
from typing import Any, Final

from rlhf_common.json_numbers import finite_number

MAX_METRICS: Final = 16
"""Maximum metrics per reward."""
NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,47}")
"""Pattern of a metric's name, valid for Prometheus and trackers."""


def problem(metrics: Mapping[Any, Any]) -> str:
    """Return the problem of a sample's metrics; empty if they are valid."""
    if len(metrics) > MAX_METRICS:
        return f"{len(metrics)} metrics came beside the reward; at most {MAX_METRICS} are taken"
    for name, value in metrics.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            shown = repr(name)[:60]
            return f"a metric is called {shown}; names are lower case letters, digits and _, such as format_ok"
        if finite_number(value) is None:
            return f"metric {name} is {repr(value)[:60]}; it must be a finite number"
    return ""
