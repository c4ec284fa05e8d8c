"""Collects vLLM's own statistics, for its dashboards (`vllm:*`) and as the load in our metrics.

Rule: the thread that steps the core writes, a scrape reads. Must never store a request that the core has dropped.
"""

from collections.abc import Iterable, Iterator, Sequence
from time import time
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, RequestStateStats

from rlhf_workers.generation.engine import EngineLoad

PREFIX = "vllm:"


class OwnMetrics(Collector):
    """vLLM's families in the process-wide registry, where other libraries register theirs too."""

    def collect(self) -> Iterator[Family]:
        """Yield vLLM's families."""
        return (family for family in REGISTRY.collect() if family.name.startswith(PREFIX))


class VllmStatistics:
    """Counts of one core."""

    def __init__(self, config: VllmConfig) -> None:
        self.load = EngineLoad(0, 0, 0.0, 0, 0, 0)
        """Load after the last counted step; zeros before."""
        self.registry: Collector = OwnMetrics()
        """See ServesMetrics."""
        self._logger: Any = PrometheusStatLogger(config)
        self._adapters = LoRARequestStates()
        self._requests: dict[str, Any] = {}
        """vLLM's statistics of each request in the core."""

    def added(self, name: str) -> None:
        """Record a request at its arrival."""
        self._requests[name] = RequestStateStats(arrival_time=time())

    def dropped(self, names: Iterable[str]) -> None:
        """Remove requests that the core has dropped."""
        for name in names:
            self._requests.pop(name, None)

    def stepped(self, groups: Sequence[Any]) -> None:
        """Count a step from the core's EngineCoreOutputs."""
        for group in groups:
            counts = IterationStats()
            for output in group.outputs:
                self._count(output, group.timestamp, counts)
            scheduler = group.scheduler_stats
            self._logger.record(scheduler, counts)
            if scheduler is not None:
                self.load = self._loaded(scheduler, counts)

    def _count(self, output: Any, moment: float, counts: Any) -> None:
        request = self._requests.get(output.request_id)
        if request is None:
            return
        began = bool(output.new_token_ids) and not request.num_generation_tokens
        counts.update_from_output(output, moment, began, request, self._adapters, None)
        if output.finish_reason is not None:
            tokens = output.prefill_stats.num_prompt_tokens if output.prefill_stats is not None else 0
            counts.update_from_finished_request(output.finish_reason, output.request_id, tokens, None, request)
            self.dropped([output.request_id])

    def _loaded(self, scheduler: Any, counts: Any) -> EngineLoad:
        prefixes, before = scheduler.prefix_cache_stats, self.load
        return EngineLoad(
            running=scheduler.num_running_reqs,
            waiting=scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs,
            kv_used=scheduler.kv_cache_usage,
            preemptions=before.preemptions + counts.num_preempted_reqs,
            prefix_tokens=before.prefix_tokens + prefixes.queries,
            prefix_hits=before.prefix_hits + prefixes.hits,
        )
