"""Serves Prometheus: the coordinator's metrics of its job, as the catalogue (`rlhf_common.metrics`) declares them.

Must never change the job.
"""

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rlhf_common.endpoint import Application, Endpoint
from rlhf_common.metrics import fusion, job, labels, process, samples, speculation, storage, training
from rlhf_common.metrics.exposition import (
    Values,
    application,
    certificate_expiry,
    disabled,
    family,
    registry_of,
    settled,
)
from rlhf_common.metrics.metric import Metric
from rlhf_common.names import PHASES, ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.job.iteration_metrics import idle_share
from rlhf_coordinator.job.iteration_stages import stage_seconds
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.measurements import gpus_of
from rlhf_coordinator.service.disk_space import DiskSpace
from rlhf_coordinator.service.run_series import series_of_run
from rlhf_coordinator.service.status import worker_status
from rlhf_coordinator.state.fusion_state import NO_FUSION
from rlhf_coordinator.state.job_state import ScheduleState
from rlhf_coordinator.state.worker import Worker

POSITIONS: Final = labels.POSITION.values
POSITION_STARTS: Final = (0, 1, 4)
"""First position of a draft in each class."""

_Series = Iterable[tuple[Metric, Values]]


class JobCollector(Collector):
    """Series of one job."""

    def __init__(self, run: JobRun, certificates: Path | None = None) -> None:
        self._run = run
        self._certificates = certificates
        checkpoints = run.context.spec.checkpoints
        folders = {"run": run.journal.folder.parent}
        self._disks = DiskSpace(folders | ({"checkpoints": Path(checkpoints.path)} if checkpoints else {}))

    def collect(self) -> Iterator[Family]:
        """Yield the families of all series, with their values now."""
        run, now = self._run, time.monotonic()
        workers = settled(lambda: list(run.state.fleet))
        for part in (
            self._progress(now),
            self._gpus(workers),
            self._samples(),
            self._workers(workers, now),
            self._fusion(workers),
            self._speculation(),
            self._training(),
            self._storage(),
            series_of_run(run.last_metrics, [str(model) for model in run.context.graph.trained]),
        ):
            for metric, values in part:
                yield family(metric, values)
        yield from run.histograms.families()

    def _progress(self, now: float) -> _Series:
        run, totals = self._run, self._run.totals
        phase, phases = run.outcome.phase if run.outcome else run.scheduled.phase, totals.phases
        seconds = phases.until(now) if run.outcome is None else phases.before
        yield job.ITERATION, {(): run.state.iteration}
        yield job.ITERATIONS, {(): run.context.spec.iterations}
        yield job.STARTED, {(): run.started_ns / 1e9}
        yield job.PHASE, {(name,): name == phase for name in PHASES}
        yield job.PHASE_SINCE, {(): phases.since_ns / 1e9}
        yield job.PHASE_SECONDS, {(name,): spent for name, spent in seconds.items()}
        yield job.STAGE_SECONDS, {(stage,): spent for stage, spent in stage_seconds(seconds).items()}
        yield job.LAST_PROGRESS, {(): totals.last_progress_ns / 1e9}
        yield job.RECOVERIES, {(): phases.recoveries}
        yield job.COORDINATOR_EPOCH, {(): run.coordinator_epoch}

    def _gpus(self, workers: list[Worker]) -> _Series:
        run, time_of = self._run, self._run.totals.gpu_time
        sizes = run.state.fleet.sizes
        connected = {group: sum(w.session != 0 for w in workers if w.group is group) for group in sizes}
        yield job.GPUS, {(group.value,): gpus_of(run, group) * count for group, count in connected.items()}
        yield job.GPU_BUSY, {(group.value,): time_of.busy.get(group, 0.0) for group in sizes}
        idle = list(time_of.idle.items())
        yield job.GPU_IDLE, {(group.value, cause): seconds for (group, cause), seconds in idle}
        yield samples.SESSIONS, {(group.value,): count for group, count in connected.items()}
        yield samples.WANTED, {(group.value,): count for group, count in sizes.items()}
        yield samples.LOST, {(group.value,): run.totals.lost[group] for group in sizes}
        yield samples.OUT_OF_MEMORY, {(group.value,): run.totals.out_of_memory[group] for group in sizes}

    def _samples(self) -> _Series:
        run, totals = self._run, self._run.totals
        yield samples.SAMPLES, {(state,): count for state, count in run.state.ledger.counts().items()}
        yield samples.UNFINISHED, {(): run.state.ledger.unfinished}
        yield samples.TOKENS, {(): totals.tokens}
        yield samples.FINISHED, {(): totals.samples}
        yield samples.TRUNCATED, {(): totals.truncated}
        yield samples.ABSTAINED, {(): totals.abstained}
        yield samples.DECODE_FAILURES, {(): totals.decode_failures}
        yield samples.FAILED, {(): totals.failed}
        yield samples.DROPPED, {(): totals.dropped}
        yield samples.REFILLED, {(): totals.refilled}
        yield samples.RETURNED, {(): totals.returned}
        failures = totals.score_failures
        yield samples.SCORE_FAILURES, {(task.name,): failures[task.name] for task in run.context.tasks}
        yield samples.STALE, {(): totals.stale}
        yield samples.MESSAGES, {(): totals.messages}
        yield samples.BAD_MESSAGES, {(): totals.bad_messages}

    def _workers(self, workers: list[Worker], now: float) -> _Series:
        state, trained = self._run.state, self._run.context.graph.trained
        shown = [settled(partial(worker_status, each, state.ledger, trained, now)) for each in workers]
        yield samples.WORKER_STATE, {(each.worker, each.state): 1 for each in shown}
        yield samples.WORKER_TOKENS, {(each.worker,): each.tokens_per_second for each in shown}
        yield samples.WORKER_RESTARTS, {(worker.name,): worker.restarts for worker in workers}
        cache_sizes = list(state.incremental.cache_bytes.items())
        yield samples.PREFIX_CACHE, {(name,): size for name, size in cache_sizes}
        connected = [worker.name for worker in workers if worker.session]
        yield job.WORKER_IDLE, {(name,): settled(partial(idle_share, self._run, name, now)) for name in connected}

    def _fusion(self, workers: list[Worker]) -> _Series:
        run, state, tail = self._run, self._run.state.fusion, self._run.scheduled.consolidation
        fused, totals, present = state.choice if tail.planned else NO_FUSION, run.totals, {w.name for w in workers}
        yield fusion.THRESHOLD, {(): fused.threshold}
        yield fusion.POOL, {(name,): 1 for name in tail.pool if name in present}
        yield fusion.POOL_WORKERS, {(): fused.pool}
        yield fusion.RELEASED, {(name,): 1 for name in tail.released if name in present}
        yield fusion.PREDICTED, {("with",): state.choice.seconds, ("without",): state.choice.off_seconds}
        yield fusion.MIGRATED, {("kv",): totals.moved_kv, ("tokens",): totals.moved_tokens}
        yield fusion.MIGRATED_BYTES, {(): totals.moved_bytes}
        yield fusion.MIGRATION_FAILURES, {(): totals.stayed}

    def _speculation(self) -> _Series:
        totals, drafts = self._run.totals, self._run.totals.drafts
        yield speculation.DRAFTED, settled(partial(_by_position, drafts.drafted))
        yield speculation.ACCEPTED, settled(partial(_by_position, drafts.accepted))
        yield speculation.STEPS, {(): drafts.steps}
        yield speculation.DRAFTED_STEPS, {(): drafts.drafted_steps}
        yield speculation.PROBES, {(): drafts.probes}
        yield speculation.SAMPLE_STEPS, {(): drafts.samples}
        yield speculation.TOKENS, {(): drafts.tokens}
        yield speculation.STEP_SECONDS, {(): drafts.seconds}
        yield speculation.DRAFT_SECONDS, {(): drafts.draft_seconds}
        yield speculation.VERIFY_SECONDS, {(): drafts.verify_seconds}
        yield speculation.REGRET_SECONDS, {(): drafts.regret_seconds}
        yield speculation.SIBLING_TOKENS, {("sent",): totals.siblings_sent, ("dropped",): totals.siblings_dropped}
        yield speculation.EARLIER_TOKENS, {(): self._run.state.siblings.earlier.tokens}
        yield speculation.AHEAD_TOKENS, {(): totals.ahead_drafted}
        yield speculation.AHEAD_COMPARED, {(): totals.ahead_compared}
        yield speculation.AHEAD_RIGHT, {(): totals.ahead_right}
        yield speculation.AHEAD_SECONDS, {(): totals.ahead_seconds}

    def _training(self) -> _Series:
        run, schedule = self._run, self._run.state.schedule
        yield training.SCHEDULE, {(schedule.method,): 1}
        yield training.PREDICTED_STEP, {(): schedule.predicted} if schedule.predicted else {}
        bubbles = {"predicted": predicted_bubble(schedule), "measured": run.last_metrics.get("training/bubble_share")}
        yield training.BUBBLE, {(source,): share for source, share in bubbles.items() if share is not None}
        yield training.GROUP_RESTARTS, {(): run.totals.group_restarts}
        yield training.GROUP_EPOCH, {(): run.state.group_epoch}

    def _storage(self) -> _Series:
        run, totals, checkpoint = self._run, self._run.totals, self._run.state.checkpoint
        yield storage.WEIGHT_VERSION, {(): run.state.version}
        loaders = [group for group in run.state.fleet.sizes if group.value in labels.WEIGHT_GROUP.values]
        yield storage.WEIGHT_BYTES, {(group.value,): totals.weight_bytes[group] for group in loaders}
        yield storage.CHECKPOINT_VERSION, {(): checkpoint.newest}
        settings = run.context.spec.checkpoints
        yield storage.CHECKPOINT_INTERVAL, {(): settings.every} if settings else {}
        yield storage.CHECKPOINT_TIME, {(): checkpoint.made_ns / 1e9} if checkpoint.made_ns else {}
        yield storage.CHECKPOINT_BYTES, {(): totals.checkpoint_bytes} if totals.checkpoint_bytes else {}
        yield storage.CHECKPOINT_FAILURES, {(): totals.checkpoint_failures}
        yield storage.TRACKERS_LOST, {(): len(run.trackers.lost)}
        yield storage.TRACE_SPANS, {(outcome,): spans for outcome, spans in run.trackers.trace_spans().items()}
        yield (
            storage.TRACKER_BEHIND,
            {(name,): iterations for name, iterations in settled(run.trackers.backlog).items()},
        )
        yield storage.JOURNAL_BYTES, {(): run.journal.bytes_written}
        spaces = self._disks.read()
        yield storage.DISK_FREE, {(name,): space.free for name, space in spaces.items()}
        yield storage.DISK_SIZE, {(name,): space.size for name, space in spaces.items()}
        yield process.CERTIFICATE_EXPIRY, certificate_expiry(self._certificates)


def _by_position(tokens: Mapping[tuple[str, int], int]) -> dict[tuple[str, ...], float]:
    values: Counter[tuple[str, ...]] = Counter()
    for (drafter, position), count in list(tokens.items()):
        values[drafter, POSITIONS[bisect_right(POSITION_STARTS, position) - 1]] += count
    return dict(values)


def predicted_bubble(schedule: ScheduleState) -> float | None:
    """Return the predicted share of a step in which a rank waits, as a mean over rows of ranks; None without one."""
    forecast = schedule.forecast
    if not forecast or not schedule.predicted:
        return None
    busy = sum(end - start for row in forecast for start, end in row.values())
    return min(1.0, max(0.0, 1 - busy / (len(forecast) * schedule.predicted)))


def prometheus_application(run: JobRun, certificates: Path | None = None) -> Application:
    """Return the application that serves the metrics of a job, or `disabled`. `certificates`: the folder of TLS."""
    if run.context.spec.metrics == "Disabled":
        return disabled
    return application(registry_of([JobCollector(run, certificates)]))


def open_endpoint(address: str) -> Endpoint:
    """Return the HTTP endpoint at host:port. Raises JobError (exit code 24) when the address cannot be bound."""
    host, _, port = address.rpartition(":")
    try:
        return Endpoint(host.strip("[]"), int(port))
    except OSError as error:
        message = f"the metrics address {address} cannot be used: {error.strerror or error}"
        raise JobError("AddressInUse", message, field="RLHF_METRICS", exit_code=ExitCode.ADDRESS_IN_USE) from error
