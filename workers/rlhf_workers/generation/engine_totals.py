"""Totals of an engine since its role began, and queue times of samples, for metrics and finished samples."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from prometheus_client.registry import Collector

from rlhf_common.samples import SampleKey
from rlhf_workers.generation.engine import EngineLoad, StepReport
from rlhf_workers.generation.engine_choice import EngineChoice
from rlhf_workers.generation.speculation.speculation_totals import SpeculationTotals

WORDS_MAX: Final = 256
"""Maximum characters of `engine_in_words`."""


@dataclass
class EngineTotals:
    """Counts over all steps and sleeps."""

    steps: int = 0
    """Steps with decode passes."""
    rows: int = 0
    """Samples in these steps, added up."""
    decoded: int = 0
    prefilled: int = 0
    reused: int = 0
    decode_ns: int = 0
    prefill_ns: int = 0
    passes: int = 0
    graph_passes: int = 0
    """Passes replayed from a capture."""
    fused_passes: int = 0
    """Passes run by fused kernels."""
    capture_ns: int = 0
    sleeps: int = 0
    """Sleeps that freed memory."""
    freed: int = 0
    """Bytes freed by sleeps, measured on the device or in the process."""
    load: EngineLoad | None = None
    """Load after the last step; None before it, or if the engine does not report it."""

    def slept(self, freed: int) -> None:
        """Add a sleep that freed so many bytes; ignore one that freed none."""
        self.sleeps += freed > 0
        self.freed += max(0, freed)

    def add(self, report: StepReport, duration_ns: int) -> None:
        """Add a step."""
        self.steps += bool(report.rows)
        self.rows += report.rows
        self.decoded += report.decoded
        self.prefilled += report.prefilled
        self.reused += report.reused
        self.prefill_ns += report.prefill_ns
        self.decode_ns += max(0, duration_ns - report.prefill_ns)
        self.passes += report.passes
        self.graph_passes += report.graph_passes
        self.fused_passes += report.fused_passes
        self.capture_ns += report.capture_ns


@dataclass
class QueueTimes:
    """Times when samples were taken up and their waits for the first new token, in this iteration."""

    _new: list[SampleKey] = field(default_factory=list)
    _taken: dict[SampleKey, int] = field(default_factory=dict)
    _waited: dict[SampleKey, float] = field(default_factory=dict)

    def begin_iteration(self) -> None:
        """Forget all samples."""
        self._new, self._taken, self._waited = [], {}, {}

    def submitted(self, keys: Iterable[SampleKey]) -> None:
        """Record samples given to the engine; the next `step_begins` starts their times."""
        self._new += keys

    def step_begins(self, now_ns: int) -> None:
        """Start the time of new samples."""
        if self._new:
            self._taken |= dict.fromkeys(self._new, now_ns)
            self._new = []

    def began(self, keys: Iterable[SampleKey], now_ns: int) -> None:
        """Record samples that got their first new token."""
        for key in keys:
            if (taken := self._taken.pop(key, None)) is not None:
                self._waited[key] = max(1, now_ns - taken) / 1e9

    def of_finished(self, key: SampleKey) -> float:
        """Remove and return the seconds that a finished sample waited; 0 if unknown, as for one that came with its
        cache."""
        self._taken.pop(key, None)
        return self._waited.pop(key, 0.0)


@runtime_checkable
class MeasuresEngine(Protocol):
    """A role with a measured engine; scrapes read it from another thread."""

    engine_totals: EngineTotals
    """Totals of its steps and sleeps."""
    engine_choice: EngineChoice | None
    """The engine and the reason; None if they are not known."""

    @property
    def engine_registry(self) -> Collector | None:
        """Collector of the engine's own metrics; None if it has none."""

    @property
    def speculation_totals(self) -> SpeculationTotals | None:
        """Totals of its drafts; None without a speculator."""


def engine_in_words(roles: Iterable[object]) -> str:
    """Return the engine of the first role that has one, with the message; empty if none has."""
    choices = (role.engine_choice for role in roles if isinstance(role, MeasuresEngine))
    return next((choice.words[:WORDS_MAX] for choice in choices if choice is not None), "")
