"""Carries out incremental scoring: sends prefixes, stores the results, counts.

Rule: nothing here changes the ledger or the journal.
"""

import logging
import time

from rlhf_api.score_blocks import incremental_tasks
from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey
from rlhf_coordinator.job.commands import send
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling import incremental_dispatch
from rlhf_coordinator.scheduling.decisions import ScorePrefix
from rlhf_coordinator.state.incremental_state import HeldPrefix
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.state.worker import CommandKind, PendingCommand
from rlhf_coordinator.storage.sample_codec import prefix_sample
from rlhf_planner.inter_stage.incremental_gain import PassSums

log = logging.getLogger(__name__)


def request_prefixes(run: JobRun, decision: ScorePrefix) -> None:
    """Send the known tokens of some unfinished samples to a worker."""
    ledger, tasks = run.state.ledger, incremental_tasks(run.context.tasks)
    samples = []
    for index in decision.samples:
        sample = ledger.samples[index]
        run.state.incremental.asked[index] = HeldPrefix(
            decision.worker, incremental_dispatch.scorable_tokens(run.state, index)
        )
        key = SampleKey(ledger.iteration, index, sample.attempt)
        prompt = run.prompts.prompt(*sample.origin).tokens
        samples.append(prefix_sample(key, tasks, prompt, sample.response.tokens))
    command = pb.Command(score_prefix=pb.ScorePrefix(samples=samples))
    detail = f"begin to score {len(samples)} unfinished samples"
    send(run, decision.worker, command, PendingCommand(CommandKind.SCORE_PREFIX, 0.0, detail))
    run.state.fleet.workers[decision.worker].scorer_onloaded = True
    run.state.incremental.joined.setdefault(decision.worker, time.monotonic())


def prefix_scored(run: JobRun, worker: str, message: pb.ScoredPrefix) -> None:
    """Record that a worker has scored a sample of the iteration as far as it can, and which prefixes it dropped."""
    incremental_state, index = run.state.incremental, message.key.sample
    if message.key.iteration != run.state.iteration:
        return
    asked = incremental_state.asked.get(index)
    if asked is not None and asked.worker == worker:
        del incremental_state.asked[index]
        incremental_state.prefixes.pop(index, None)
        if message.tokens:
            incremental_state.prefixes[index] = HeldPrefix(worker, message.tokens)
        if message.tokens < asked.tokens:
            incremental_state.full[worker] = incremental_state.loads()[worker]
    for other in message.dropped:
        prefix = incremental_state.prefixes.get(other)
        if prefix is not None and prefix.worker == worker and other != index:
            del incremental_state.prefixes[other]
            incremental_state.full[worker] = incremental_state.loads()[worker]
    incremental_state.dropped += len(message.dropped)
    incremental_state.cache_bytes[worker] = message.cache_bytes
    incremental_state.max_bytes = max(incremental_state.max_bytes, message.cache_bytes)
    run.wake()


def decoding_started(run: JobRun, index: int) -> None:
    """Record when a sample was first leased for decoding."""
    run.state.incremental.begun.setdefault(index, time.monotonic())


def response_finished(run: JobRun, index: int) -> None:
    """Record when a response was complete; a requested prefix of it is not awaited any more."""
    run.state.incremental.asked.pop(index, None)
    run.state.incremental.finished[index] = time.monotonic()


def scoring_assigned(run: JobRun, index: int, worker: str, tasks: tuple[str, ...]) -> None:
    """Record that tasks of a finished sample went to a worker. Forget its prefix; on another worker it counts as
    dropped."""
    incremental_state = run.state.incremental
    incremental_state.joined.setdefault(worker, time.monotonic())
    if index in incremental_state.prefixes and not set(tasks).isdisjoint(incremental_tasks(run.context.tasks)):
        incremental_state.dropped += incremental_state.prefixes.pop(index).worker != worker


def score_taken(run: JobRun, message: pb.ScoredSample) -> None:
    """Record when a sample has all its scores; count the tokens of an incremental task, and those scored early."""
    if run.state.ledger.samples[message.key.sample].state in (SampleState.SCORED, SampleState.DROPPED):
        run.state.incremental.scored[message.key.sample] = time.monotonic()
        run.state.incremental.last_tasks[message.task] += 1
    if message.task in incremental_tasks(run.context.tasks):
        incremental_state, index = run.state.incremental, message.key.sample
        incremental_state.early_tokens += message.early_tokens
        incremental_state.tokens += run.state.prompt_tokens[index] + len(run.state.ledger.samples[index].response)


def observe(run: JobRun, observation: pb.Observation) -> None:
    """Record a worker's scoring pass in this iteration: the tokens of a task and the seconds that they took."""
    if observation.WhichOneof("work") == "scoring" and observation.iteration == run.state.iteration:
        line = run.state.incremental.passes.setdefault(observation.scoring.task, PassSums())
        line.add(observation.scoring.tokens, (observation.end_ns - observation.start_ns) / 1e9)


def worker_lost(run: JobRun, worker: str) -> None:
    """Forget the prefixes on a worker, which count as dropped, and its requests and limits."""
    incremental_state = run.state.incremental
    before = len(incremental_state.prefixes)
    incremental_state.prefixes = {
        index: item for index, item in incremental_state.prefixes.items() if item.worker != worker
    }
    incremental_state.asked = {index: item for index, item in incremental_state.asked.items() if item.worker != worker}
    incremental_state.dropped += before - len(incremental_state.prefixes)
    incremental_state.full.pop(worker, None)
    incremental_state.cache_bytes.pop(worker, None)


def prefix_refused(run: JobRun, worker: str, failure: pb.Failure) -> None:
    """Forget the prefixes on a worker that failed, and set its limit of prefixes to 0."""
    log.warning("%s could not score unfinished samples: %s", worker, failure.message)
    worker_lost(run, worker)
    run.state.incremental.full[worker] = 0
