"""What an engine did since its role began, and how long samples waited in it, for Prometheus and for finished samples.

Rule: written by the compute thread, read by a scrape; counts only rise. Moments come in as arguments, in nanoseconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from prometheus_client.registry import Collector

from rlhf_common.samples import SampleKey
from rlhf_workers.generation.engine import EngineLoad, StepReport
from rlhf_workers.generation.engine_choice import EngineChoice
from rlhf_workers.generation.speculation.speculation_totals import SpeculationTotals

WORDS_MAX: Final = 256
"""Characters of a name in a heartbeat."""


@dataclass
class EngineTotals:
    """Counts over all steps."""

    steps: int = 0
    """That decoded."""
    rows: int = 0
    """Samples in these steps, added up."""
    decoded: int = 0
    prefilled: int = 0
    kept: int = 0
    decode_ns: int = 0
    prefill_ns: int = 0
    passes: int = 0
    graph_passes: int = 0
    """Replayed from a graph."""
    fused_passes: int = 0
    """Run by kernels of several steps each."""
    capture_ns: int = 0
    sleeps: int = 0
    """Times that it gave its memory back."""
    freed: int = 0
    """Bytes that this gave, as the device or the process was measured to use less afterwards."""
    load: EngineLoad | None = None
    """After the last step; None: the engine does not say."""

    def slept(self, freed: int) -> None:
        """Add a sleep after which so many bytes less were in use; none when there was nothing to give."""
        self.sleeps += freed > 0
        self.freed += max(0, freed)

    def add(self, report: StepReport, duration_ns: int) -> None:
        """Add a step."""
        self.steps += bool(report.rows)
        self.rows += report.rows
        self.decoded += report.decoded
        self.prefilled += report.prefilled
        self.kept += report.kept
        self.prefill_ns += report.prefill_ns
        self.decode_ns += max(0, duration_ns - report.prefill_ns)
        self.passes += report.passes
        self.graph_passes += report.graph_passes
        self.fused_passes += report.fused_passes
        self.capture_ns += report.capture_ns


@dataclass
class QueueTimes:
    """When samples were taken up, and what they waited until their first new token; of the iteration in progress."""

    _new: list[SampleKey] = field(default_factory=list)
    _taken: dict[SampleKey, int] = field(default_factory=dict)
    _waited: dict[SampleKey, float] = field(default_factory=dict)

    def begin_iteration(self) -> None:
        """Forget samples of another iteration, which went elsewhere."""
        self._new, self._taken, self._waited = [], {}, {}

    def submitted(self, keys: Iterable[SampleKey]) -> None:
        """Note that samples were given to the engine, whose next step is their first."""
        self._new += keys

    def step_begins(self, now_ns: int) -> None:
        """Let the time of new samples begin."""
        if self._new:
            self._taken |= dict.fromkeys(self._new, now_ns)
            self._new = []

    def began(self, keys: Iterable[SampleKey], now_ns: int) -> None:
        """Note that samples have their first new token."""
        for key in keys:
            if (taken := self._taken.pop(key, None)) is not None:
                self._waited[key] = max(1, now_ns - taken) / 1e9

    def of_finished(self, key: SampleKey) -> float:
        """Return the seconds that a finished sample waited; 0: the engine does not say, or it came from elsewhere."""
        self._taken.pop(key, None)
        return self._waited.pop(key, 0.0)


@runtime_checkable
class MeasuresEngine(Protocol):
    """A role with an engine that is measured; read by scrapes from another thread."""

    engine_totals: EngineTotals
    """What its steps were."""
    engine_choice: EngineChoice | None
    """Which engine it is, and why; None: nobody chose."""

    @property
    def engine_registry(self) -> Collector | None:
        """Metrics of the engine's own; None: it has none."""

    @property
    def speculation_totals(self) -> SpeculationTotals | None:
        """What it drafted; None: it decodes token by token."""


def engine_in_words(roles: Iterable[object]) -> str:
    """Return the engine of the role that has one, and why it is this one; empty: none has."""
    choices = (role.engine_choice for role in roles if isinstance(role, MeasuresEngine))
    return next((choice.words[:WORDS_MAX] for choice in choices if choice is not None), "")
