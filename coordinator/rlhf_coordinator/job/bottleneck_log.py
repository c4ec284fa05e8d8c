"""The last iterations, and when the bottlenecks in them are logged next.

Rule: plain data; gone with the process. `bottlenecks` changes it.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from rlhf_planner.explain.iteration_profile import IterationProfile

EVERY_SECONDS: Final = 30.0
"""Between two times at least: people read them."""
KEPT: Final = 4
"""Iterations: a mean over several, and little memory."""


@dataclass
class BottleneckLog:
    """The bottleneck log of one job."""

    facts: deque[IterationProfile] = field(default_factory=lambda: deque(maxlen=KEPT))
    next_at: float = field(default_factory=lambda: time.monotonic() + EVERY_SECONDS)
    """Before this moment of the monotonic clock nothing is logged."""
