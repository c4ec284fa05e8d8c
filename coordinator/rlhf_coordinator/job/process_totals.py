"""What a coordinator counts since its process started, for Prometheus.

Rule: counts only rise. The event loop adds to them and a scrape reads them from another thread, so what belongs
together is replaced as a whole (`PhaseTotals`).
"""

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
    """Samples that iterations went on without, because no worker could decode them."""
    dropped: int = 0
    """Samples of prompts whose rewards are all equal, where such are dropped."""
    refilled: int = 0
    """Samples that took their place."""
    decode_failures: int = 0
    """Tries to decode a sample that ended with it as the only cause."""
    evaluated: int = 0
    """Responses of evaluations that were finished."""
    evaluations_given_up: int = 0
    returned: int = 0
    """Leases to decode that were taken back, because their worker was lost or reconnected."""
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
    """Tokens that workers were sent to draft by, each counted once for each worker."""
    siblings_dropped: int = 0
    """Such tokens that came too late to be sent."""
    drafts: DraftTotals = field(default_factory=DraftTotals)
    checkpoint_failures: int = 0
    checkpoint_bytes: int = 0
    """Of the newest checkpoint; 0: this process has made none."""
    lost: Counter[Group] = field(default_factory=Counter)
    out_of_memory: Counter[Group] = field(default_factory=Counter)
    """Failures of workers of a group for want of memory, in their own words."""
    score_failures: Counter[str] = field(default_factory=Counter)
    """By task."""
    weight_bytes: Counter[Group] = field(default_factory=Counter)
    """Weights that workers of a group loaded."""
    last_progress_ns: int = field(default_factory=time.time_ns)
    """When a result of a worker last came in; the start of this process before there was any."""
    first_scored: int = -1
    """The last iteration that had its first score."""
    phases: PhaseTotals = field(default_factory=lambda: PhaseTotals(since=time.monotonic(), since_ns=time.time_ns()))
    gpu_time: GpuTime = field(default_factory=GpuTime)

    def progressed(self) -> None:
        """Note that the job came a step further."""
        self.last_progress_ns = time.time_ns()
