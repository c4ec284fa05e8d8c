"""Inputs of a simulation and its result. Values only.

Workers 0..generation_workers-1 generate; dedicated inference workers follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rlhf_planner.inter_stage.costs import Transfer

PREFETCH_SHARE = 8
"""A worker gets 1/8 more samples than it decodes at once, at least one more, as in the coordinator's dispatch of
generation."""


@dataclass(frozen=True)
class IterationSetup:
    """Inputs of one iteration of generation and inference."""

    generation_workers: int
    inference_workers: int
    """Number of dedicated inference workers; with 0, only released generation workers score."""
    prompts: Sequence[int]
    """Prompt tokens of each sample of the batch, in the order of leases."""
    lines: Sequence[int] = ()
    """Prompt number of each sample; empty if unknown."""
    overlap: bool = True
    """Whether samples are scored as soon as they are finished. Otherwise scoring starts after the last one."""
    mode: Literal["Disabled", "Auto", "Fixed"] = "Auto"
    threshold: int | None = None
    """Threshold R_t of mode Fixed."""
    pool: int | None = None
    """Pool size m of mode Fixed."""
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
        """Number of samples of the iteration."""
        return len(self.prompts)


class WorkerSpan(NamedTuple):
    """Activity of a worker for some time, for drawing."""

    worker: int
    kind: Literal["prefill", "decode", "wake", "score"]
    start: float
    end: float
    samples: int


class Transit(NamedTuple):
    """Move of a sample from one worker to another, for drawing."""

    sample: int
    source: int
    destination: int
    kv: bool
    start: float
    end: float


@dataclass(frozen=True)
class Forecast:
    """Simulated iteration of generation and inference. Times are seconds from its start."""

    seconds: float
    """Seconds until the last sample is scored."""
    generation_seconds: float
    """Seconds until the last sample is generated."""
    scoring_seconds: float
    """Seconds from the end of generation until the last sample is scored."""
    threshold: int
    """Threshold R_t in samples; 0 means no fusion."""
    pool: int
    """Number of workers that decode the tail; all workers without fusion."""
    threshold_seconds: float | None
    """Seconds until the threshold was reached; None without fusion."""
    moved: int
    moved_by_kv: int
    moved_bytes: float
    released: tuple[float | None, ...]
    """Seconds until each generation worker could score; None if it never could."""
    idle: tuple[float, ...]
    """Share of `seconds` in which each worker neither prefilled, decoded nor scored; dedicated inference workers last.
    """
    decode_busy: float
    """Total seconds that workers decoded and prefilled."""
    score_busy: float
    """Total seconds that workers scored."""
    finished: tuple[float, ...]
    """Seconds until each sample was generated."""
    spans: tuple[WorkerSpan, ...] = ()
    """Activities of workers, only on request."""
    transits: tuple[Transit, ...] = ()

    @property
    def idle_share(self) -> float:
        """Mean share of idle time over all workers."""
        return sum(self.idle) / len(self.idle)
