"""Serves Prometheus: the coordinator's series, `rlhf_*`.

Rule: values are read from the job's parts when scraped; nothing is counted twice. Scrapes come from another thread and
only read.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlhf_api.endpoint import Application, Endpoint
from rlhf_api.names import METRICS_PREFIX, PHASES, ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.job.iteration_metrics import idle_share
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.service.status import worker_status
from rlhf_coordinator.state.fusion_state import NO_FUSION


class JobCollector(Collector):
    """Series of one job, labelled with its name."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._job = run.context.job.name

    def collect(self) -> Iterator[Metric]:
        """Yield every series."""
        run, state = self._run, self._run.state
        phase = run.outcome.phase if run.outcome else run.scheduled.phase
        trained, now = run.context.graph.trained, time.monotonic()
        workers = [worker_status(worker, state.ledger, trained, now) for worker in list(state.fleet)]
        yield self._gauge("iteration", "Iteration in progress, from 0.", {(): state.iteration})
        yield self._gauge("weight_version", "Weight version the job has reached.", {(): state.version})
        yield self._gauge("phase", "1 for the phase the job is in.", {(p,): p == phase for p in PHASES}, "phase")
        ledger = {(state,): count for state, count in state.ledger.counts().items()}
        yield self._gauge("samples", "Samples of the iteration by state.", ledger, "state")
        states = {(w.worker, w.state): 1 for w in workers}
        yield self._gauge("worker_state", "1 for the state a worker is in.", states, "worker", "state")
        rates = {(w.worker,): w.tokens_per_second for w in workers}
        yield self._gauge("worker_tokens_per_second", "Tokens per second of a worker.", rates, "worker")
        yield from self._fusion()
        last = {(name,): value for name, value in run.last_metrics.items()}
        yield self._gauge("iteration_metric", "Metrics of the last finished iteration.", last, "name")
        yield self._gauge("checkpoint_version", "Newest checkpoint.", {(): state.checkpoint.newest})
        yield self._gauge("coordinator_epoch", "Starts of the coordinator.", {(): run.coordinator_epoch})
        yield from self._counters()

    def _fusion(self) -> Iterator[Metric]:
        run, state, tail = self._run, self._run.state.fusion, self._run.scheduled.consolidation
        fused = state.choice if tail.planned else NO_FUSION
        unfinished = {(): run.state.ledger.unfinished}
        yield self._gauge("unfinished_samples", "Samples whose response is not complete.", unfinished)
        yield self._gauge("fusion_threshold", "Unfinished samples that consolidate.", {(): fused.threshold})
        pool, released = {(name,): 1 for name in tail.pool}, {(name,): 1 for name in tail.released}
        yield self._gauge("fusion_pool", "1 for a worker of the migration pool.", pool, "worker")
        yield self._gauge("fusion_released", "1 for a generation worker that scores.", released, "worker")
        seconds = {("with",): state.choice.seconds, ("without",): state.choice.off_seconds}
        text = "Predicted seconds of generation and inference, with and without fusion."
        yield self._gauge("fusion_predicted_seconds", text, seconds, "fusion")
        held = {(name,): size for name, size in list(run.state.incremental.cache_bytes.items())}
        yield self._gauge("prefix_cache_bytes", "Held of samples that are scored before they end.", held, "worker")
        idle = {(worker.name,): idle_share(run, worker.name) for worker in list(run.state.fleet) if worker.session}
        yield self._gauge(
            "worker_idle_share", "Of generation and inference, neither decoded nor scored.", idle, "worker"
        )
        moved = {("kv",): run.totals.moved_kv, ("tokens",): run.totals.moved_tokens}
        yield self._counter("migrated_samples", "Samples moved between workers.", moved, "by")
        yield self._counter("migrated_bytes", "KV cache moved between workers.", {(): run.totals.moved_bytes})

    def _counters(self) -> Iterator[Metric]:
        run, totals = self._run, self._run.totals
        yield self._counter("tokens", "Response tokens decoded.", {(): totals.tokens})
        yield self._counter("finished_samples", "Responses finished.", {(): totals.samples})
        yield self._counter("stale_messages", "Messages dropped by fencing.", {(): totals.stale})
        yield self._counter("messages", "Messages of workers.", {(): totals.messages})
        yield self._counter("journal_bytes", "Bytes journaled.", {(): run.journal.bytes_written})
        yield self._counter("training_group_restarts", "Training group restarts.", {(): totals.group_restarts})
        restarts = {(worker.name,): worker.restarts for worker in list(run.state.fleet)}
        yield self._counter("worker_restarts", "Times a worker came back as a new process.", restarts, "worker")
        seconds = {(phase,): spent for phase, spent in list(totals.phase_seconds.items())}
        yield self._counter("phase_seconds", "Seconds spent by phase.", seconds, "phase")

    def _gauge(self, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
        return self._fill(GaugeMetricFamily(METRICS_PREFIX + name, text, labels=["job", *labels]), values)

    def _counter(self, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
        return self._fill(CounterMetricFamily(METRICS_PREFIX + name, text, labels=["job", *labels]), values)

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[Any, float]) -> Metric:
        for labels, value in values.items():
            family.add_metric([self._job, *labels], float(value))
        return family


def prometheus_application(run: JobRun) -> Application:
    """Return what an endpoint serves as the metrics of a job."""
    registry = CollectorRegistry()
    registry.register(JobCollector(run))
    application: Application = make_wsgi_app(registry)
    return application


def open_endpoint(address: str) -> Endpoint:
    """Return the HTTP endpoint at host:port. Raises JobError (exit code 24) when it cannot be bound."""
    host, _, port = address.rpartition(":")
    try:
        return Endpoint(host.strip("[]"), int(port))
    except OSError as error:
        message = f"the metrics address {address} cannot be used: {error.strerror or error}"
        raise JobError("AddressInUse", message, field="RLHF_METRICS", exit_code=ExitCode.ADDRESS_IN_USE) from error
