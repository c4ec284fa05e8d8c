"""What is scored of unfinished samples, and where: what incremental scoring goes by in an iteration, and its counts.

Rule: plain data, outside the ledger: it is made of what workers said last and may be wrong, which costs time and
changes nothing else. The scheduler reads it (`incremental_dispatch`); `fusion.incremental_scoring` and
`fusion.counterfactual` change it. Gone with the process.
"""

from collections import Counter
from dataclasses import dataclass, field

from rlhf_planner.inter_stage.incremental_gain import PassSums


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """How much of a sample a worker has scored: tokens, prompt included."""

    worker: str
    tokens: int


@dataclass
class IncrementalState:
    """The state of incremental scoring in a job; all but `chosen` and `planned` is of the iteration in progress."""

    chosen: bool = False
    """Mode Auto: the counterfactual of an earlier iteration says that it is worth it."""
    planned: bool | None = None
    """The same for the next iteration; None: no counterfactual was computed since."""
    predicted: float | None = None
    """Mode Auto: seconds that this iteration gains by it, by its counterfactual; None: that did not come in time."""
    held: dict[int, HeldPrefix] = field(default_factory=dict)
    """Sample -> the worker that holds a scored prefix of it."""
    asked: dict[int, HeldPrefix] = field(default_factory=dict)
    """Sample -> the worker that was asked for a prefix, and has not answered."""
    full: dict[str, int] = field(default_factory=dict)
    """Worker -> samples that it held when one found no room: it is given new ones only below that."""
    cache_bytes: dict[str, int] = field(default_factory=dict)
    """Worker -> bytes of keys and values that it holds, as it said last."""
    max_bytes: int = 0
    """The most that a worker held in this iteration."""
    dropped: int = 0
    """Prefixes that were lost: to make room, with their worker, or because another worker scored the sample."""
    early_tokens: int = 0
    """Tokens of scored samples that had been scored before their sample ended, over all tasks that can be."""
    tokens: int = 0
    """All tokens of these samples, over the same tasks."""
    begun: dict[int, float] = field(default_factory=dict)
    """Sample -> when it was first leased to be decoded."""
    finished: dict[int, float] = field(default_factory=dict)
    """Sample -> when its response was complete."""
    scored: dict[int, float] = field(default_factory=dict)
    """Sample -> when it had its last score."""
    places: dict[int, list[tuple[float, str]]] = field(default_factory=dict)
    """Sample -> (since when, who decodes it; empty: it was queued again), in order, as this process saw it."""
    last_tasks: Counter[str] = field(default_factory=Counter)
    """Task -> samples of which it was the last result."""
    joined: dict[str, float] = field(default_factory=dict)
    """Worker -> when it was first given something to score."""
    passes: dict[str, PassSums] = field(default_factory=dict)
    """Task -> what its passes took, as its workers observed."""

    def begin_iteration(self) -> None:
        """Forget what belongs to an iteration: samples and weights are others now."""
        self.held, self.asked, self.full, self.cache_bytes = {}, {}, {}, {}
        self.begun, self.finished, self.joined, self.passes = {}, {}, {}, {}
        self.scored, self.last_tasks, self.places = {}, Counter(), {}
        self.max_bytes = self.dropped = self.early_tokens = self.tokens = 0
        self.predicted = None
        self.adopt()

    def adopt(self) -> None:
        """Put what was planned into force."""
        self.chosen = self.chosen if self.planned is None else self.planned
        self.planned = None

    def loads(self) -> Counter[str]:
        """Return worker -> samples that it holds or was asked for."""
        places = {index: item.worker for index, item in (*self.held.items(), *self.asked.items())}
        return Counter(places.values())
