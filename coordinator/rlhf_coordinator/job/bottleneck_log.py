"""The profiles of the last iterations, and the time of the next bottleneck log.

Rule: plain data, lost with the process.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from rlhf_planner.explain.iteration_profile import IterationProfile

EVERY_SECONDS: Final = 30.0
"""Least interval between two logs, in seconds."""
KEPT: Final = 4
"""Most stored iterations."""


@dataclass
class BottleneckLog:
    """The bottleneck log of one job."""

    facts: deque[IterationProfile] = field(default_factory=lambda: deque(maxlen=KEPT))
    next_at: float = field(default_factory=lambda: time.monotonic() + EVERY_SECONDS)
    """Moment of the monotonic clock before which no search starts."""
