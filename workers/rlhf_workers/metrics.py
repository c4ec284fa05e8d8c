"""Prometheus endpoint of one worker: its own values, its engine's totals, and the engine's own metrics.

Rule: values are read at the scrape. An engine's own families are served unchanged beside ours, at most
MAX_ENGINE_SERIES series, and without families that begin with our prefixes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rlhf_common.endpoint import Application
from rlhf_common.metrics import labels, process, worker, worker_drafts
from rlhf_common.metrics.exposition import certificate_expiry, family, registry_of, settled, text_application
from rlhf_common.metrics.metric import Metric
from rlhf_workers.compute import Compute
from rlhf_workers.generation.engine_registry import ENGINES
from rlhf_workers.generation.engine_totals import MeasuresEngine
from rlhf_workers.generation.speculation.speculation_totals import SpeculationTotals
from rlhf_workers.outbox import SessionOutbox
from rlhf_workers.weights.offload import MOVES

log = logging.getLogger(__name__)

MAX_ENGINE_SERIES: Final = 2000
"""Maximum series of an engine's own families."""
OUR_PREFIXES: Final = ("rlhf_", "process_")


@dataclass(frozen=True)
class MeasuredWorker:
    """Sources of a worker's metrics."""

    name: str
    group: str
    outbox: SessionOutbox
    compute: Compute
    device: torch.device
    connected: Callable[[], bool]
    """Whether the worker has a session; called from any thread."""
    certificates: Path | None = None


class WorkerCollector(Collector):
    """Series of one worker and of its engine."""

    def __init__(self, measured: MeasuredWorker) -> None:
        self._measured = measured
        self._engine_failed = False

    def collect(self) -> Iterator[Family]:
        """Yield the families of the worker and of its first engine, then the engine's own."""
        measured = self._measured
        own = (measured.name, measured.group)
        for metric, value in (*self._values(), *_device_memory(measured.device)):
            yield family(metric, {own: value})
        versions = measured.compute.snapshot.versions
        yield family(worker.WEIGHTS, {(*own, model): version for model, version in versions.items()})
        moves = sorted((measured.outbox.moves() | MOVES.totals()).items())
        yield family(worker.MOVED, {(*own, move): size for move, (size, _) in moves})
        yield family(worker.MOVE_SECONDS, {(*own, move): took for move, (_, took) in moves})
        yield family(process.CERTIFICATE_EXPIRY, certificate_expiry(measured.certificates))
        engines = [role for role in settled(measured.compute.roles) if isinstance(role, MeasuresEngine)]
        for engine in engines[:1]:
            if (choice := engine.engine_choice) is not None:
                named = choice.engine if choice.engine in ENGINES else "own"
                yield family(worker.ENGINE, {(*own, named, choice.reason): 1})
            for metric, value in _engine_values(engine):
                yield family(metric, {own: value})
            if (totals := engine.speculation_totals) is not None:
                yield from _of_drafts(totals, own)
            yield from self._of_engine(engine)

    def _values(self) -> Iterator[tuple[Metric, float]]:
        measured = self._measured
        yield worker.TOKENS, measured.outbox.tokens
        yield worker.BUSY, measured.compute.busy_seconds()
        yield worker.ACTIVE, measured.compute.snapshot.active
        yield worker.QUEUED, measured.compute.queued_samples()
        yield worker.CONNECTED, measured.connected()

    def _of_engine(self, engine: MeasuresEngine) -> Iterator[Family]:
        """Yield an engine's own families; if reading them fails, ours are still served."""
        registry = engine.engine_registry
        if registry is None:
            return
        try:
            families = list(settled(lambda: list(registry.collect())))
        except Exception as error:  # third-party code may raise anything
            if not self._engine_failed:
                log.warning("the engine's own metrics cannot be read, and are left out: %s", error)
            self._engine_failed = True
            return
        yield from bounded(families)


def bounded(families: Iterable[Family]) -> Iterator[Family]:
    """Yield an engine's families up to the limit, without those that begin with OUR_PREFIXES."""
    room = MAX_ENGINE_SERIES
    for each in families:
        if each.name.startswith(OUR_PREFIXES):
            continue
        room -= len(each.samples)
        if room >= 0:
            yield each


def _engine_values(engine: MeasuresEngine) -> Iterator[tuple[Metric, float]]:
    totals = engine.engine_totals
    yield worker.ENGINE_STEPS, totals.steps
    yield worker.ENGINE_ROWS, totals.rows
    yield worker.ENGINE_DECODED, totals.decoded
    yield worker.ENGINE_PREFILLED, totals.prefilled
    yield worker.ENGINE_KEPT, totals.reused
    yield worker.ENGINE_DECODE_SECONDS, totals.decode_ns / 1e9
    yield worker.ENGINE_PREFILL_SECONDS, totals.prefill_ns / 1e9
    yield worker.ENGINE_PASSES, totals.passes
    yield worker.ENGINE_GRAPH_PASSES, totals.graph_passes
    yield worker.ENGINE_FUSED_PASSES, totals.fused_passes
    yield worker.ENGINE_CAPTURE_SECONDS, totals.capture_ns / 1e9
    yield worker.ENGINE_SLEEPS, totals.sleeps
    yield worker.ENGINE_FREED, totals.freed
    if totals.load is not None:
        yield worker.ENGINE_RUNNING, totals.load.running
        yield worker.ENGINE_WAITING, totals.load.waiting
        yield worker.ENGINE_KV_USED, totals.load.kv_used
        yield worker.ENGINE_PREEMPTIONS, totals.load.preemptions
        yield worker.ENGINE_PREFIX_TOKENS, totals.load.prefix_tokens
        yield worker.ENGINE_PREFIX_HITS, totals.load.prefix_hits


def _of_drafts(totals: SpeculationTotals, own: tuple[str, str]) -> Iterator[Family]:
    """Yield how an engine chose its drafts; `own` are the labels of the worker."""
    largest = int(labels.DRAFT_BUDGET.values[-1])
    budgets = dict.fromkeys(labels.DRAFT_BUDGET.values, 0)
    for budget, steps in totals.by_budget.items():
        budgets[str(min(budget, largest))] += steps
    yield family(worker_drafts.BUDGETS, {(*own, budget): steps for budget, steps in budgets.items()})
    yield family(worker_drafts.REASONS, {(*own, reason): steps for reason, steps in totals.by_reason.items()})


def _device_memory(device: torch.device) -> list[tuple[Metric, float]]:
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return []
    free, size = torch.cuda.mem_get_info(device)
    return [(worker.DEVICE_USED, size - free), (worker.DEVICE_SIZE, size)]


def metrics_of(measured: MeasuredWorker) -> Application:
    """Return the metrics application of a worker's endpoint."""
    return text_application(registry_of([WorkerCollector(measured)]))
