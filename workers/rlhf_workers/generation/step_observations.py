"""Turns thousands of engine steps into a few spans of the timeline and observations of the cost model.

Rule: one span covers at least half a second of steps of one iteration, unless work ends or the iteration changes
before; it is named for what took most of its time. The observation of the same steps says how much prefill was among
them, how many samples a step had and how many keys each read: by that a planner knows what a step costs. Where samples
came by their tokens another one says what building their caches took. Must never read a clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from rlhf_api import control_pb2 as pb
from rlhf_workers.generation.engine import StepReport
from rlhf_workers.worker_role import Outbox

SPAN_NS: Final = 500_000_000
"""Shortest span in the middle of work: two a second a worker stay legible and cheap."""


@dataclass
class _Rebuilding:
    """Caches built from known tokens: by prefills of nothing else, or by steps in which such tokens were decoded again.

    Prefills are of `rows` samples of `tokens` tokens, steps of `rows` samples with `tokens` keys, all passes together.
    """

    ns: int = 0
    passes: int = 0
    rows: int = 0
    tokens: int = 0

    def add(self, report: StepReport, step_ns: int) -> None:
        """A step that took so long."""
        if report.prefills and all(prefill.resumed for prefill in report.prefills):
            self.ns += report.prefill_ns
            self.passes += len(report.prefills)
            self.rows += sum(prefill.samples for prefill in report.prefills)
            self.tokens += sum(prefill.tokens for prefill in report.prefills)
        if report.replayed:
            self.ns += step_ns - report.prefill_ns
            self.passes += 1
            self.rows += report.rows
            self.tokens += report.keys

    def attributes(self) -> dict[str, str]:
        """Return the attributes of the span; none when no cache was built. A coordinator of the version before reads
        them."""
        if not self.passes:
            return {}
        return {
            "rebuild_seconds": f"{self.ns / 1e9:.4f}",
            "rebuild_passes": str(self.passes),
            "rebuild_rows": f"{self.rows / self.passes:.2f}",
            "rebuild_tokens": f"{self.tokens / self.rows:.1f}",
        }

    def observation(self) -> pb.RebuildObservation:
        """Return the numbers of all passes; there is at least one."""
        return pb.RebuildObservation(
            passes=self.passes,
            rows_per_pass=self.rows / self.passes,
            tokens_per_row=self.tokens / self.rows,
            seconds=self.ns / 1e9,
        )


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
    rebuilding: _Rebuilding = field(default_factory=_Rebuilding)

    def observations(self) -> Iterator[pb.Observation]:
        """Yield what the steps took, and what building caches among them took when any was built."""
        decode = pb.DecodeObservation(
            steps=self.steps,
            rows_per_step=self.rows / self.steps,
            keys_per_row=self.keys / max(1, self.rows),
            prefill_seconds=self.prefill_ns / 1e9,
        )
        yield pb.Observation(decode=decode)
        if self.rebuilding.passes:
            yield pb.Observation(rebuild=self.rebuilding.observation())


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
        window.rebuilding.add(report, end_ns - start_ns)
        if end_ns - window.start_ns >= SPAN_NS:
            self.flush(outbox)

    def flush(self, outbox: Outbox) -> None:
        """End the window: the engine has nothing to do, or something else begins."""
        window, self._window = self._window, None
        if window is None:
            return
        stretch = pb.Observation(start_ns=window.start_ns, end_ns=window.end_ns, iteration=window.iteration)
        for observation in window.observations():
            observation.MergeFrom(stretch)
            outbox.observe(observation)
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
            **window.rebuilding.attributes(),
        )
