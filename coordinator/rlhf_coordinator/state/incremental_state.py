"""What is scored of unfinished samples, and where: what incremental scoring goes by in an iteration, and its counts.

Rule: plain data, outside the ledger: it is made of what workers said last and may be wrong, which costs time and
changes nothing else. `incremental` reads it and decides, `prefixing` changes it. Gone with the process.
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
    """Of one job; all but `chosen` and `planned` of the iteration in progress."""

    chosen: bool = False
    """Mode Auto: simulation says that it is worth it."""
    planned: bool | None = None
    """Likewise of the next iteration; None: nothing was replayed since."""
    predicted: float | None = None
    """Mode Auto: seconds that this iteration gains by it, by its replay; None: it was not replayed in time."""
    held: dict[int, HeldPrefix] = field(default_factory=dict)
    """Sample -> who holds its prefix."""
    asked: dict[int, HeldPrefix] = field(default_factory=dict)
    """Sample -> who was asked for how much and has not answered."""
    full: dict[str, int] = field(default_factory=dict)
    """Worker -> samples it held when one found no room: it is given new ones below that."""
    cache_bytes: dict[str, int] = field(default_factory=dict)
    """Worker -> keys and values it holds, as it said last."""
    most_bytes: int = 0
    """That a worker ever held in this iteration."""
    dropped: int = 0
    """Prefixes that were lost: to make room, with their worker, or because another worker scored the sample."""
    early_tokens: int = 0
    """Of samples that are scored: tokens that had been scored before they ended, over all tasks that can be."""
    tokens: int = 0
    """Likewise: all of their tokens."""
    begun: dict[int, float] = field(default_factory=dict)
    """Sample -> when it was first leased to be decoded."""
    finished: dict[int, float] = field(default_factory=dict)
    """Sample -> when its response was complete."""
    joined: dict[str, float] = field(default_factory=dict)
    """Worker -> when it was first given something to score."""
    passes: dict[str, PassSums] = field(default_factory=dict)
    """Task -> what its passes took, by its workers' spans."""

    def begin_iteration(self) -> None:
        """Nothing is held: other samples, other weights."""
        self.held, self.asked, self.full, self.cache_bytes = {}, {}, {}, {}
        self.begun, self.finished, self.joined, self.passes = {}, {}, {}, {}
        self.most_bytes = self.dropped = self.early_tokens = self.tokens = 0
        self.predicted = None
        self.adopt()

    def adopt(self) -> None:
        """What was planned is in force."""
        self.chosen = self.chosen if self.planned is None else self.planned
        self.planned = None

    def loads(self) -> Counter[str]:
        """Worker -> samples it holds or was asked for."""
        places = {index: item.worker for index, item in (*self.held.items(), *self.asked.items())}
        return Counter(places.values())
