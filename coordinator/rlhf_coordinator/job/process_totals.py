"""Counters of a coordinator since its process started, for Prometheus."""

import time
from collections import Counter
from dataclasses import dataclass, field

from rlhf_common.names import Group
from rlhf_coordinator.job.gpu_time import GpuTime
from rlhf_coordinator.job.iteration_stages import PhaseTotals
from rlhf_coordinator.state.speculation_state import DraftTotals


@dataclass
class ProcessTotals:
    """Counters since this process started."""

    tokens: int = 0
    samples: int = 0
    truncated: int = 0
    abstained: int = 0
    failed: int = 0
    """Samples that iterations left out because no worker could decode them."""
    dropped: int = 0
    """Samples of prompts whose rewards are all equal, where such prompts are dropped."""
    refilled: int = 0
    """Samples that replaced dropped ones."""
    decode_failures: int = 0
    """Failures to decode a sample that count it as their cause."""
    evaluated: int = 0
    """Finished responses of evaluations."""
    evaluations_given_up: int = 0
    returned: int = 0
    """Leases to decode that were revoked, because their worker was lost or reconnected."""
    stale: int = 0
    messages: int = 0
    bad_messages: int = 0
    group_restarts: int = 0
    moved_kv: int = 0
    moved_tokens: int = 0
    moved_bytes: int = 0
    stayed: int = 0
    """Samples that were to move with their KV cache and did not."""
    siblings_sent: int = 0
    """Tokens of siblings and of earlier epochs sent to workers as draft hints, counted once per worker."""
    siblings_dropped: int = 0
    """Tokens for draft hints that a worker had not received when it no longer needed their prompt group."""
    ahead_drafted: int = 0
    """Tokens that idle workers decoded ahead."""
    ahead_compared: int = 0
    """Tokens decoded ahead in whose place a finished sample has a token."""
    ahead_right: int = 0
    """Tokens of these before the first difference."""
    ahead_seconds: float = 0.0
    """Seconds of workers that drafted ahead."""
    drafts: DraftTotals = field(default_factory=DraftTotals)
    checkpoint_failures: int = 0
    checkpoint_bytes: int = 0
    """Bytes of the ranks' files in the newest checkpoint that this process saved; 0 without one."""
    lost: Counter[Group] = field(default_factory=Counter)
    out_of_memory: Counter[Group] = field(default_factory=Counter)
    """Out-of-memory failures that workers of a group reported."""
    score_failures: Counter[str] = field(default_factory=Counter)
    """Failures by task."""
    weight_bytes: Counter[Group] = field(default_factory=Counter)
    """Bytes of weights that workers of a group loaded."""
    last_progress_ns: int = field(default_factory=time.time_ns)
    """Time of the last progress in nanoseconds since the Unix epoch; before the first, of the start of this process."""
    first_scored: int = -1
    """Last iteration whose first score was recorded; -1 before one."""
    phases: PhaseTotals = field(default_factory=lambda: PhaseTotals(since=time.monotonic(), since_ns=time.time_ns()))
    gpu_time: GpuTime = field(default_factory=GpuTime)

    def progressed(self) -> None:
        """Record that the job made progress."""
        self.last_progress_ns = time.time_ns()
