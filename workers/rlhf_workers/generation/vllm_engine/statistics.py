"""What vLLM counts of itself: for its own dashboards under its own names (`vllm:*`), and as the load that ours show.

vLLM's output processor, which is left out here, would hand its counts to its logger; this does, with vLLM's classes.
Rule: written by the thread that steps the core, read by a scrape; nothing is decided by it. Must never hold a request
that the core holds no longer.
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
    """Families of vLLM alone: it registers them where every library of the process registers its own."""

    def collect(self) -> Iterator[Family]:
        """Yield them as vLLM serves them."""
        return (family for family in REGISTRY.collect() if family.name.startswith(PREFIX))


class VllmStatistics:
    """Counts of one core."""

    def __init__(self, config: VllmConfig) -> None:
        self.load = EngineLoad(0, 0, 0.0, 0, 0, 0)
        """After the last step."""
        self.registry: Collector = OwnMetrics()
        """See ServesMetrics."""
        self._logger: Any = PrometheusStatLogger(config)
        self._adapters = LoRARequestStates()
        self._requests: dict[str, Any] = {}
        """What vLLM keeps of each that the core holds."""

    def added(self, name: str) -> None:
        """Note a request from its arrival on."""
        self._requests[name] = RequestStateStats(arrival_time=time())

    def dropped(self, names: Iterable[str]) -> None:
        """Forget requests that were aborted."""
        for name in names:
            self._requests.pop(name, None)

    def stepped(self, groups: Sequence[Any]) -> None:
        """Count a step by what the core said of it: EngineCoreOutputs."""
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
