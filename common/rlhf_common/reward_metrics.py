"""Numbers that a reward gives beside its number: what they may be called, and how many there may be.

They come from user code, and each is a metric of the run and a column of sample tables: so they are few, and their
names are words. Rule: pure; whoever takes some in asks here first.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

MAX_METRICS: Final = 16
"""Of one reward: as many as anybody looks at."""
NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,47}")
"""Of a metric, as Prometheus and trackers take it."""


def problem(metrics: Mapping[Any, Any]) -> str:
    """Return what is wrong with the metrics of a sample; empty when nothing is."""
    if len(metrics) > MAX_METRICS:
        return f"{len(metrics)} metrics came beside the reward; at most {MAX_METRICS} are taken"
    for name, value in metrics.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            shown = repr(name)[:60]
            return f"a metric is called {shown}; names are lower case letters, digits and _, such as format_ok"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"metric {name} is {repr(value)[:60]}; it must be a finite number"
    return ""
