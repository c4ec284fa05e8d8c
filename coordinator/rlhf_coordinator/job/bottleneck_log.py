"""The last iterations, and the time of the next bottleneck log.

Rule: plain data, lost with the process. `bottlenecks` changes it.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from rlhf_planner.explain.iteration_profile import IterationProfile

EVERY_SECONDS: Final = 30.0
"""Least interval between two logs, in seconds, because people read them."""
KEPT: Final = 4
"""Number of iterations: enough for a mean, and little memory."""


@dataclass
class BottleneckLog:
    """The bottleneck log of one job."""

    facts: deque[IterationProfile] = field(default_factory=lambda: deque(maxlen=KEPT))
    next_at: float = field(default_factory=lambda: time.monotonic() + EVERY_SECONDS)
    """Moment of the monotonic clock before which nothing is logged."""
