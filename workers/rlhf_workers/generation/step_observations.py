"""Summarizes thousands of engine steps as a few spans of the timeline and observations for the cost model.

A step that captured a graph is a separate span without an observation. Must never read a clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey
from rlhf_workers.generation.engine import StepReport
from rlhf_workers.generation.speculation.evidence import DraftedTokens
from rlhf_workers.worker_role import Outbox

SPAN_NS: Final = 500_000_000
"""Nanoseconds after which a span ends."""
SAMPLES_SHOWN: Final = 12
"""Maximum samples of one span whose drafts are shown."""


@dataclass
class _Rebuilding:
    """Caches rebuilt from known tokens, by prefills of such samples or by steps that decode such tokens again.

    `rows`: samples of all passes. `tokens`: tokens of all prefills, and keys of all steps.
    """

    ns: int = 0
    passes: int = 0
    rows: int = 0
    tokens: int = 0

    def add(self, report: StepReport, step_ns: int) -> None:
        """Add a step and its nanoseconds."""
        if report.prefills and all(prefill.resumed for prefill in report.prefills):
            self.ns += report.prefill_ns
            self.passes += len(report.prefills)
            self.rows += sum(prefill.samples for prefill in report.prefills)
            self.tokens += sum(prefill.tokens for prefill in report.prefills)
        if report.replayed:
            # Known tokens per sample count as passes.
            passes = max(1, round(report.replayed / max(1, report.replayed_samples)))
            self.ns += step_ns - report.prefill_ns
            self.passes += passes
            self.rows += report.rows * passes
            self.tokens += _keys_of_samples(report) * passes

    def attributes(self) -> dict[str, str]:
        """Return the attributes of the span; empty if no cache was rebuilt."""
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
class _Verified:
    """Steps that verified drafted tokens."""

    steps: int = 0
    rows: int = 0
    keys: int = 0
    ns: int = 0

    def message(self) -> pb.VerifiedSteps:
        """Return the numbers of all such steps; there is at least one."""
        return pb.VerifiedSteps(
            steps=self.steps,
            rows_per_step=self.rows / self.steps,
            keys_per_row=self.keys / max(1, self.rows),
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
    passes: int = 0
    graph_passes: int = 0
    capture_ns: int = 0
    draft_ns: int = 0
    drawing_rows: int = 0
    """Samples of steps without replayed tokens, added up."""
    drawn: int = 0
    """Tokens drawn in steps without replayed tokens."""
    drafted: int = 0
    accepted: int = 0
    samples: list[str] = field(default_factory=list)
    """Samples that finished after drafts, each with accepted and drafted tokens."""
    rebuilding: _Rebuilding = field(default_factory=_Rebuilding)
    verified: _Verified = field(default_factory=_Verified)

    def add(self, report: StepReport, step_ns: int) -> None:
        """Add a step and its nanoseconds."""
        self.prefill_ns += report.prefill_ns
        self.steps += 1
        self.tokens += report.decoded
        self.rows += report.rows
        keys = _keys_of_samples(report)
        self.keys += keys
        self.passes += report.passes
        self.graph_passes += report.graph_passes
        self.capture_ns += report.capture_ns
        self.draft_ns += report.draft_ns
        if not report.replayed:
            self.drawing_rows += report.rows
            self.drawn += report.decoded
        self.drafted += report.drafted
        self.accepted += report.accepted
        if report.drafted:
            self.verified.steps += 1
            self.verified.rows += report.rows
            self.verified.keys += keys
            self.verified.ns += max(0, step_ns - report.prefill_ns - report.draft_ns)
        self.rebuilding.add(report, step_ns)

    def draft_attributes(self) -> dict[str, str]:
        """Return the drafted tokens of all samples and of some finished ones; empty without drafts."""
        if not self.drafted:
            return {}
        attributes = {"drafted": str(self.drafted), "accepted": str(self.accepted)}
        finished = ", ".join(self.samples[:SAMPLES_SHOWN])
        return attributes | ({"finished_accepted_of_drafted": finished} if finished else {})

    def graph_attributes(self) -> dict[str, str]:
        """Return the share of replayed passes and the capture time; empty without graphs."""
        if not (self.graph_passes or self.capture_ns):
            return {}
        return {
            "graph_share": f"{self.graph_passes / self.passes:.2f}",
            "capture_seconds": f"{self.capture_ns / 1e9:.3f}",
        }

    def observations(self) -> Iterator[pb.Observation]:
        """Yield the cost of the steps, and of rebuilding caches if any was rebuilt."""
        decode = pb.DecodeObservation(
            steps=self.steps,
            rows_per_step=self.rows / self.steps,
            keys_per_row=self.keys / max(1, self.rows),
            prefill_seconds=self.prefill_ns / 1e9,
            tokens_per_row=self.drawn / max(1, self.drawing_rows),
            draft_seconds=self.draft_ns / 1e9,
            verified=self.verified.message() if self.verified.steps else None,
        )
        yield pb.Observation(decode=decode)
        if self.rebuilding.passes:
            yield pb.Observation(rebuild=self.rebuilding.observation())


class Activity:
    """The open window of one engine."""

    def __init__(self) -> None:
        self._window: _Window | None = None
        self._finished: list[str] = []

    def finished(self, key: SampleKey, drafted: DraftedTokens) -> None:
        """Record the drafts of a sample that finished in the step that is added next."""
        if drafted.drafted:
            self._finished.append(f"{key.sample}: {drafted.accepted}/{drafted.drafted}")

    def add(self, report: StepReport, iteration: int, start_ns: int, end_ns: int, outbox: Outbox) -> None:
        """Add a step during `iteration` that ran from start_ns to end_ns; report a window that ends."""
        if self._window is not None and (self._window.iteration != iteration or report.capture_ns):
            self.flush(outbox)
        if self._window is None:
            self._window = _Window(iteration, start_ns, end_ns)
        window = self._window
        window.end_ns = end_ns
        window.add(report, end_ns - start_ns)
        window.samples += self._finished
        self._finished = []
        if end_ns - window.start_ns >= SPAN_NS or report.capture_ns:
            self.flush(outbox)

    def flush(self, outbox: Outbox) -> None:
        """End and report the window, if there is one."""
        window, self._window = self._window, None
        if window is None:
            return
        stretch = pb.Observation(start_ns=window.start_ns, end_ns=window.end_ns, iteration=window.iteration)
        for observation in window.observations() if not window.capture_ns else ():
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
            **window.graph_attributes(),
            **window.draft_attributes(),
        )


def _keys_of_samples(report: StepReport) -> int:
    """Return the keys that one row per sample reads, estimated from the mean over all rows."""
    return report.keys * report.rows // max(1, report.rows, report.pass_rows)
