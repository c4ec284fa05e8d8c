"""The ticks of the coordinator: decide and carry out, at most MAX_ROUNDS times; then wait.

The loop wakes on changes (`JobRun.wake`), and after TICK_SECONDS for changes that only time causes.
"""

import asyncio
import contextlib
import logging
import time
from typing import Final

from rlhf_coordinator.evaluation import rounds
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.fusion import fusion_planning
from rlhf_coordinator.job import measurements, sample_histories
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.loop.actions import Actions
from rlhf_coordinator.loop.event_handlers import EventHandlers
from rlhf_coordinator.scheduling import iteration

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.25
"""Longest wait for a change, in seconds."""

DEBOUNCE_SECONDS: Final = 0.002
"""Least seconds to collect messages before a decision.

The pause is longer after a long tick, see DEBOUNCE_FACTOR.
"""

DEBOUNCE_FACTOR: Final = 4.0
"""Ratio of the pause after a tick to its duration, up to MAX_DEBOUNCE_SECONDS."""

MAX_DEBOUNCE_SECONDS: Final = 0.02
"""Longest pause in seconds."""

MAX_ROUNDS: Final = 64
"""Most rounds of decisions in one tick."""


def pause_before_tick(start: float, end: float, now: float) -> float:
    """Return the seconds to wait for more messages after a change; the last tick ran from `start` to `end`."""
    rest = end + min(MAX_DEBOUNCE_SECONDS, DEBOUNCE_FACTOR * (end - start)) - now
    return max(DEBOUNCE_SECONDS, rest)


class Loop:
    """Runs one job to its end."""

    def __init__(self, run: JobRun, event_handlers: EventHandlers, actions: Actions) -> None:
        self._run = run
        self._event_handlers = event_handlers
        self._actions = actions

    async def until_over(self) -> None:
        """Tick until the job is Complete, Failed or Stopped."""
        run, start, end = self._run, 0.0, 0.0
        while run.outcome is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await run.changed.wait()
                await asyncio.sleep(pause_before_tick(start, end, time.monotonic()))
            run.changed.clear()
            start = time.monotonic()
            self.tick()
            end = time.monotonic()

    def tick(self) -> None:
        """Decide and act until no decision is left or the job is over, in at most MAX_ROUNDS rounds.

        A JobError becomes the failure that ends the job.
        """
        run = self._run
        arrived, run.arrived = run.arrived, 0.0
        before = run.scheduled.consolidation
        try:
            self._event_handlers.expire(time.monotonic())
            for number in range(MAX_ROUNDS):
                now = time.monotonic()
                scheduled = run.scheduled = iteration.decide(run.context, run.state, now)
                rounds.note_wait(run, now)
                if number or not scheduled.decisions:  # the first decisions of a tick may end their phase at once
                    self._enter_phase(scheduled.phase, arrived)
                if not scheduled.decisions:
                    fusion_planning.track_consolidation(run, before)
                    return
                for decision in scheduled.decisions:
                    self._actions.carry_out(decision)
                    if run.outcome is not None:
                        return
            log.error("after %d rounds decisions remain: %s", MAX_ROUNDS, run.scheduled.decisions)
        except JobError as error:
            run.state.failure = error.failure
            self._actions.carry_out(iteration.decide(run.context, run.state, time.monotonic()).decisions[0])
        finally:
            sample_histories.note_places(run, time.monotonic())

    def _enter_phase(self, phase: str, arrived: float) -> None:
        run, now, before = self._run, time.monotonic(), self._run.times.phase
        if phase == before:
            return
        seconds = run.times.enter(phase, now)
        if arrived:
            run.times.add_control(before, now - arrived)
        end = time.time_ns()
        measurements.phase_entered(run, phase, now, end)
        run.record_span(before, end - int(seconds * 1e9), end, run.state.iteration)
        log.info("%s (iteration %d)", phase, run.state.iteration)
