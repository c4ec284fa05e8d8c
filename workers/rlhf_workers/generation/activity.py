"""Turns thousands of engine steps into a few spans of the timeline.

Rule: one span covers at least half a second of steps of one iteration, unless work ends or the iteration changes
before; it is named for what took most of its time and says how much prefill was in it, how many samples a step had and
how many keys each read: by that a planner knows what a step costs. Must never read a clock.
"""

from dataclasses import dataclass
from typing import Final

from rlhf_workers.generation.protocol import StepReport
from rlhf_workers.role import Outbox

SPAN_NS: Final = 500_000_000
"""Shortest span in the middle of work: two a second a worker stay legible and cheap."""


@dataclass
class _Window:
    iteration: int
    start_ns: int
    end_ns: int
    prefill_ns: int = 0
    steps: int = 0
    tokens: int = 0
    rows: int = 0
    keys: int = 0


class Activity:
    """The open window of one engine."""

    def __init__(self) -> None:
        self._window: _Window | None = None

    def add(self, report: StepReport, iteration: int, start_ns: int, end_ns: int, outbox: Outbox) -> None:
        """A step of samples of `iteration` ran from start_ns to end_ns."""
        if self._window is not None and self._window.iteration != iteration:
            self.flush(outbox)
        if self._window is None:
            self._window = _Window(iteration, start_ns, end_ns)
        window = self._window
        window.end_ns = end_ns
        window.prefill_ns += report.prefill_ns
        window.steps += 1
        window.tokens += report.decoded
        window.rows += report.rows
        window.keys += report.keys
        if end_ns - window.start_ns >= SPAN_NS:
            self.flush(outbox)

    def flush(self, outbox: Outbox) -> None:
        """Ends the window: the engine has nothing to do, or something else begins."""
        window, self._window = self._window, None
        if window is not None:
            outbox.span(
                "prefill" if 2 * window.prefill_ns > window.end_ns - window.start_ns else "decode",
                window.start_ns,
                window.end_ns,
                window.iteration,
                tokens=str(window.tokens),
                steps=str(window.steps),
                prefill_seconds=f"{window.prefill_ns / 1e9:.3f}",
                rows=f"{window.rows / window.steps:.2f}",
                context=f"{window.keys / max(1, window.rows):.0f}",
            )
