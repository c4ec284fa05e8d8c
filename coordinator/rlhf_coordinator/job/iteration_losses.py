"""Says in the log why iterations take as long as they do, which `rlhf describe` and `rlhf explain` read there.

Rule: replayed in a thread, at most every EVERY_SECONDS and for a twentieth of the time, and nothing waits for it. What
is said is bounded: SHOWN lines. A failure is logged as that of a background task and changes nothing.
"""

import asyncio
import logging
import time
from typing import Final

from rlhf_coordinator.job.background_tasks import BackgroundTasks
from rlhf_coordinator.job.said_losses import EVERY_SECONDS, SaidLosses
from rlhf_planner.explain.facts import IterationFacts
from rlhf_planner.explain.ranking import SHOWN, explain

log = logging.getLogger(__name__)

IDLE_TIMES: Final = 20.0
"""The pause is at least this many times as long as the replays took."""


def say_losses(losses: SaidLosses, background: BackgroundTasks, facts: IterationFacts, now: float) -> None:
    """Take in the facts of an iteration, and begin to look for losses when it is time; `now`: seconds of the monotonic
    clock."""
    losses.facts.append(facts)
    if now >= losses.next_at:
        losses.next_at = float("inf")  # one at a time
        background.start("losses", _say(losses, list(losses.facts)))


async def _say(losses: SaidLosses, facts: list[IterationFacts]) -> None:
    started = time.monotonic()
    try:
        findings = await asyncio.to_thread(explain, facts)
        for number, finding in enumerate(findings[:SHOWN], 1):
            log.info("loss %d of iteration %d: %s: %s", number, facts[-1].iteration, finding.cause, finding.words)
    finally:
        now = time.monotonic()
        losses.next_at = now + max(EVERY_SECONDS, IDLE_TIMES * (now - started))
