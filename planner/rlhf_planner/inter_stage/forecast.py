"""What is to be simulated: the workers, the batch and the settings of an iteration; and what comes out.

Values only. Worker indices: 0..generation_workers-1 generate, the dedicated inference workers come after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rlhf_planner.inter_stage.costs import Transfer

PREFETCH_SHARE = 8
"""A worker holds 1/8 more samples than it decodes at once, as the dispatch of generation does."""


@dataclass(frozen=True)
class IterationSetup:
    """One iteration of generation and inference."""

    generation_workers: int
    inference_workers: int
    """Dedicated ones; 0: generation workers score once they are released."""
    prompts: Sequence[int]
    """Tokens of each sample's prompt; as many as the batch has samples, in the order they are leased out."""
    lines: Sequence[int] = ()
    """Which prompt each sample is of; empty: not known."""
    overlap: bool = True
    """A sample is scored as soon as it is finished; False: when all are."""
    mode: Literal["Disabled", "Auto", "Fixed"] = "Auto"
    threshold: int | None = None
    """Mode Fixed: R_t."""
    pool: int | None = None
    """Mode Fixed: m."""
    transfer: Transfer = "Auto"

    def __post_init__(self) -> None:
        if self.generation_workers < 1:
            raise ValueError(f"generation_workers is {self.generation_workers}, must be at least 1")
        if self.inference_workers < 0:
            raise ValueError(f"inference_workers is {self.inference_workers}, must not be negative")
        if not len(self.prompts):
            raise ValueError("prompts is empty: an iteration has at least one sample")
        if self.mode == "Fixed" and (self.threshold is None or self.pool is None):
            raise ValueError("mode is Fixed: threshold and pool must be given")

    @property
    def batch(self) -> int:
        """Samples of the iteration."""
        return len(self.prompts)


class WorkerSpan(NamedTuple):
    """What a worker does for a while, for drawing."""

    worker: int
    kind: Literal["prefill", "decode", "wake", "score"]
    start: float
    end: float
    samples: int


class Transit(NamedTuple):
    """A sample on its way from one worker to another, for drawing."""

    sample: int
    source: int
    destination: int
    kv: bool
    start: float
    end: float


@dataclass(frozen=True)
class Forecast:
    """What an iteration of generation and inference takes. Times are seconds from its begin."""

    seconds: float
    """Until the last sample is scored."""
    generation_seconds: float
    """Until the last sample is generated."""
    scoring_seconds: float
    """After that, until the last is scored."""
    threshold: int
    """R_t; 0: no fusion."""
    pool: int
    """Workers that kept the tail; all of them without fusion."""
    threshold_seconds: float | None
    """When the tail was consolidated; None: never."""
    moved: int
    moved_by_kv: int
    moved_bytes: float
    released: tuple[float | None, ...]
    """By generation worker: when it could begin to score; None: never."""
    idle: tuple[float, ...]
    """By worker, dedicated inference workers last: share of `seconds` in which it neither decoded nor scored."""
    decode_busy: float
    """Seconds that workers decoded and prefilled, all together."""
    score_busy: float
    """Seconds that workers scored, all together."""
    finished: tuple[float, ...]
    """By sample: when it was generated."""
    spans: tuple[WorkerSpan, ...] = ()
    """Only when asked for."""
    transits: tuple[Transit, ...] = ()

    @property
    def idle_share(self) -> float:
        """Mean share of idle time over all workers."""
        return sum(self.idle) / len(self.idle)
