"""The state of incremental scoring in an iteration: which prefixes are scored where, and its counts.

Rule: plain data, outside the ledger; lost with the process.
"""

from collections import Counter
from dataclasses import dataclass, field

from rlhf_planner.inter_stage.incremental_gain import PassSums


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """The number of tokens of a sample, including the prompt, that a worker has scored, or was asked to score."""

    worker: str
    tokens: int


@dataclass
class IncrementalState:
    """The state of incremental scoring in a job; all but `chosen` and `planned` belongs to the iteration in
    progress."""

    chosen: bool = False
    """In mode Auto, whether the counterfactual of an earlier iteration shows enough gain."""
    planned: bool | None = None
    """The same for the next iteration; None without a newer counterfactual."""
    predicted: float | None = None
    """In mode Auto, the predicted gain of this iteration in seconds; None without a counterfactual of it."""
    prefixes: dict[int, HeldPrefix] = field(default_factory=dict)
    """Sample -> the worker with a scored prefix of it."""
    asked: dict[int, HeldPrefix] = field(default_factory=dict)
    """Sample -> the worker whose answer about a requested prefix is awaited."""
    full: dict[str, int] = field(default_factory=dict)
    """Worker -> number of samples from which it gets no new one, set when its cache is full or its scoring fails."""
    cache_bytes: dict[str, int] = field(default_factory=dict)
    """Worker -> bytes of keys and values in its last report."""
    max_bytes: int = 0
    """Largest such number of bytes in this iteration."""
    dropped: int = 0
    """Number of prefixes that were lost."""
    early_tokens: int = 0
    """Tokens that had passed through a model before the Score of their sample, over all incremental tasks."""
    tokens: int = 0
    """All prompt and response tokens of the scored samples, over the same tasks."""
    begun: dict[int, float] = field(default_factory=dict)
    """Sample -> moment of its first lease for decoding."""
    finished: dict[int, float] = field(default_factory=dict)
    """Sample -> moment when its response was complete."""
    scored: dict[int, float] = field(default_factory=dict)
    """Sample -> moment of its last score."""
    places: dict[int, list[tuple[float, str]]] = field(default_factory=dict)
    """Sample -> (moment, worker that decodes it from then on; empty when queued again), in order, as seen by this
    process."""
    last_tasks: Counter[str] = field(default_factory=Counter)
    """Task -> number of samples whose last result it was."""
    joined: dict[str, float] = field(default_factory=dict)
    """Worker -> moment when it first got a prefix, or scoring tasks of a finished sample."""
    passes: dict[str, PassSums] = field(default_factory=dict)
    """Task -> sums of its passes, from observations."""

    def begin_iteration(self) -> None:
        """Reset the state of an iteration, and apply the plan."""
        self.prefixes, self.asked, self.full, self.cache_bytes = {}, {}, {}, {}
        self.begun, self.finished, self.joined, self.passes = {}, {}, {}, {}
        self.scored, self.last_tasks, self.places = {}, Counter(), {}
        self.max_bytes = self.dropped = self.early_tokens = self.tokens = 0
        self.predicted = None
        self.adopt()

    def adopt(self) -> None:
        """Apply the plan, if there is one."""
        self.chosen = self.chosen if self.planned is None else self.planned
        self.planned = None

    def loads(self) -> Counter[str]:
        """Return worker -> number of samples that it has or was asked for."""
        places = {index: item.worker for index, item in (*self.prefixes.items(), *self.asked.items())}
        return Counter(places.values())
