"""Logs why iterations take as long as they do, at most SHOWN lines each time.

The search runs in a thread, and rests at least EVERY_SECONDS and IDLE_TIMES its duration.
"""

import asyncio
import logging
import time
from typing import Final

from rlhf_coordinator.job.background_tasks import BackgroundTasks
from rlhf_coordinator.job.bottleneck_log import EVERY_SECONDS, BottleneckLog
from rlhf_planner.explain.iteration_profile import IterationProfile
from rlhf_planner.explain.ranking import SHOWN, explain

log = logging.getLogger(__name__)

IDLE_TIMES: Final = 20.0
"""Least ratio of the pause after a search to its duration."""


def log_bottlenecks(
    bottlenecks: BottleneckLog, background: BackgroundTasks, facts: IterationProfile, now: float
) -> None:
    """Add the profile of an iteration, and start the search for bottlenecks when it is due.

    `now`: seconds of the monotonic clock.
    """
    bottlenecks.facts.append(facts)
    if now >= bottlenecks.next_at:
        bottlenecks.next_at = float("inf")  # one search at a time
        background.start("losses", _log(bottlenecks, list(bottlenecks.facts)))


async def _log(bottlenecks: BottleneckLog, facts: list[IterationProfile]) -> None:
    started = time.monotonic()
    try:
        findings = await asyncio.to_thread(explain, facts)
        for number, finding in enumerate(findings[:SHOWN], 1):
            log.info("loss %d of iteration %d: %s: %s", number, facts[-1].iteration, finding.cause, finding.words)
    finally:
        now = time.monotonic()
        bottlenecks.next_at = now + max(EVERY_SECONDS, IDLE_TIMES * (now - started))
