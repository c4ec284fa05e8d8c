"""Measurements of a job: times and lengths of samples, steps, moves, loads and phases, and their counters.

Rule: it changes only counters and histograms.
"""

import time
from typing import Final

from rlhf_common import control_pb2 as pb
from rlhf_common.metrics import fusion, job, labels, samples, storage, training
from rlhf_common.names import Group
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.state.worker import Worker

OUT_OF_MEMORY: Final = "OutOfMemory"
"""Reason of a worker's failure."""
MAX_SECONDS: Final = 86400.0
"""Longest plausible queueing or optimizer step in seconds; a longer one is ignored."""


def heartbeat(run: JobRun, worker: Worker, message: pb.Heartbeat, now: float) -> None:
    """Count the GPU time of a worker since its last heartbeat; nothing for the first one of a session.

    Call this before the fleet processes the message.
    """
    before = worker.heartbeat
    if not before.ByteSize() or message.busy_seconds < before.busy_seconds:
        return  # the first of a session has no predecessor to compare with
    run.totals.gpu_time.beat(
        worker.name,
        worker.group,
        worker.last_heard,
        now,
        message.busy_seconds - before.busy_seconds,
        gpus=gpus_of(run, worker.group),
        ranks=worker.group is run.state.fleet.rank_group,
        tail=not run.state.ledger.count(SampleState.QUEUED),
    )


def gpus_of(run: JobRun, group: Group) -> int:
    """Return the GPUs of one worker of a group; a worker without a GPU counts as having one."""
    spec = run.context.spec
    fields = {Group.GENERATION: spec.generation, Group.INFERENCE: spec.inference, Group.TRAINING: spec.training}
    return max(1, fields[group].gpus_per_replica)


def observed(run: JobRun, worker: str, observation: pb.Observation) -> None:
    """Record a worker's interval of work if it is an optimizer step, or a device turn."""
    seconds, kind = (observation.end_ns - observation.start_ns) / 1e9, observation.WhichOneof("work")
    if kind == "train_step" and seconds <= MAX_SECONDS:
        run.histograms.observe(training.STEP_SECONDS, seconds, iteration=observation.iteration, worker=worker)
    elif kind in ("offload", "onload"):
        run.totals.gpu_time.turned(worker, seconds)


def failed(run: JobRun, worker: Worker, failure: pb.Failure) -> None:
    """Count a worker's failure if it is out of memory."""
    if failure.reason == OUT_OF_MEMORY:
        run.totals.out_of_memory[worker.group] += 1


def response_finished(run: JobRun, worker: str, message: pb.FinishedSample, tokens: int) -> None:
    """Record a complete response of a batch, of `tokens` tokens."""
    run.totals.samples += 1
    run.totals.truncated += message.finish_reason == "length"
    iteration, index = message.key.iteration, message.key.sample
    run.histograms.observe(samples.RESPONSE_TOKENS, tokens, iteration=iteration, worker=worker, sample=index)
    if 0 < message.queue_seconds <= MAX_SECONDS:
        seconds = message.queue_seconds
        run.histograms.observe(samples.QUEUE_SECONDS, seconds, iteration=iteration, worker=worker, sample=index)
    begun = run.state.incremental.begun.get(index)
    if begun is not None:
        seconds = time.monotonic() - begun
        run.histograms.observe(samples.GENERATION_SECONDS, seconds, iteration=iteration, worker=worker, sample=index)


def score_taken(run: JobRun, worker: str, message: pb.ScoredSample) -> None:
    """Record the result of a scoring task of a batch."""
    now, iteration, index = time.monotonic(), message.key.iteration, message.key.sample
    run.totals.abstained += message.abstained and run.state.ledger.samples[index].abstained
    finished, begun = run.state.incremental.finished.get(index), run.state.incremental.begun
    if finished is not None:
        task = message.task
        run.histograms.observe(
            samples.SCORING_SECONDS, now - finished, task, iteration=iteration, worker=worker, sample=index
        )
    if run.totals.first_scored != iteration:
        run.totals.first_scored = iteration
        if begun:
            first = min(begun.values())
            run.histograms.observe(samples.FIRST_SCORE_SECONDS, now - first, iteration=iteration, worker=worker)


def sample_moved(run: JobRun, worker: str, moved: pb.MigratedSample) -> None:
    """Record that a sample moved away from a worker with its KV cache."""
    run.totals.moved_kv += 1
    run.totals.moved_bytes += moved.bytes
    key = moved.key
    for metric, seconds in ((fusion.MIGRATION_SECONDS, moved.seconds), (fusion.MIGRATION_PAUSED, moved.paused_seconds)):
        run.histograms.observe(metric, seconds, iteration=key.iteration, worker=worker, sample=key.sample)


def weights_loaded(run: JobRun, worker: Worker, load: pb.LoadResult) -> None:
    """Record that a worker loaded a version, if it belongs to a group that loads weights."""
    if worker.group.value not in labels.WEIGHT_GROUP.values:
        return
    run.totals.weight_bytes[worker.group] += load.bytes
    group, iteration = worker.group.value, load.version - 1
    run.histograms.observe(storage.WEIGHT_UPDATE, load.seconds, group, iteration=iteration, worker=worker.name)
    if 0 < load.copy_seconds <= load.seconds:
        run.histograms.observe(storage.WEIGHT_COPY, load.copy_seconds, group, iteration=iteration, worker=worker.name)


def phase_entered(run: JobRun, phase: str, now: float, now_ns: int) -> None:
    """Record the begin of another phase. `now`, `now_ns`: one moment by both clocks."""
    before = run.totals.phases
    if before.phase == "Publishing":
        run.histograms.observe(storage.WEIGHT_PAUSED, now - before.since, iteration=run.state.iteration)
    run.totals.phases = before.entered(phase, now, now_ns)
    run.totals.gpu_time.enter(phase, now)


def iteration_finished(run: JobRun, seconds: float) -> None:
    """Record the seconds of an iteration that is closed."""
    run.histograms.observe(job.ITERATION_SECONDS, seconds, iteration=run.state.iteration)
