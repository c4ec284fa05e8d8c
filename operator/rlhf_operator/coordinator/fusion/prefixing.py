"""Carries out incremental scoring: sends prefixes, takes in what became of them, keeps its counts.

Rule: nothing here touches the ledger or the journal. A worker that is lost, or answers nothing, takes its prefixes with
it: its samples are begun anew elsewhere, or scored as a whole when they are finished.
"""

import logging
import time

from rlhf_api import control_pb2 as pb
from rlhf_api.incremental import prefix_tasks
from rlhf_operator.coordinator.deciding import incremental
from rlhf_operator.coordinator.deciding.decisions import ScorePrefix
from rlhf_operator.coordinator.job.commands import send
from rlhf_operator.coordinator.job.run import Run
from rlhf_operator.coordinator.storage.batch import packed
from rlhf_operator.coordinator.world.prefix_state import Held
from rlhf_operator.coordinator.world.worker import Pending, Work
from rlhf_planner.inter_stage.early import Line

log = logging.getLogger(__name__)


def ask(run: Run, decision: ScorePrefix) -> None:
    """Sends all that is known of some unfinished samples to a worker."""
    ledger, tasks = run.world.ledger, prefix_tasks(run.plan.tasks)
    samples = []
    for index in decision.samples:
        sample = ledger.samples[index]
        run.world.prefixes.asked[index] = Held(decision.worker, incremental.goal(run.world, index))
        samples.append(
            pb.PrefixSample(
                key=pb.SampleKey(iteration=ledger.iteration, sample=index, epoch=sample.epoch),
                tasks=tasks,
                prompt=packed("int32", run.prompts.of(ledger.iteration, index).tokens),
                response=packed("int32", sample.response.tokens),
            )
        )
    command = pb.Command(score_prefix=pb.ScorePrefix(samples=samples))
    detail = f"begin to score {len(samples)} unfinished samples"
    send(run, decision.worker, command, Pending(Work.PREFIX, 0.0, detail))
    run.world.fleet.workers[decision.worker].awake = True
    run.world.prefixes.joined.setdefault(decision.worker, time.monotonic())


def told(run: Run, worker: str, message: pb.ScoredPrefix) -> None:
    """A worker has gone as far as it can with a sample."""
    state, index = run.world.prefixes, message.key.sample
    if message.key.iteration != run.world.iteration:
        return
    asked = state.asked.get(index)
    if asked is not None and asked.worker == worker:
        del state.asked[index]
        state.held.pop(index, None)
        if message.tokens:
            state.held[index] = Held(worker, message.tokens)
        if message.tokens < asked.tokens:
            state.full[worker] = state.loads()[worker]
    for other in message.dropped:
        held = state.held.get(other)
        if held is not None and held.worker == worker and other != index:
            del state.held[other]
            state.full[worker] = state.loads()[worker]
    state.dropped += len(message.dropped)
    state.cache_bytes[worker] = message.cache_bytes
    state.most_bytes = max(state.most_bytes, message.cache_bytes)
    run.wake()


def begun(run: Run, index: int) -> None:
    """A sample was handed out to decode."""
    run.world.prefixes.begun.setdefault(index, time.monotonic())


def finished(run: Run, index: int) -> None:
    """A response is complete: nothing more is begun, what is there is kept for its Score."""
    run.world.prefixes.asked.pop(index, None)
    run.world.prefixes.finished[index] = time.monotonic()


def handed_out(run: Run, index: int, worker: str, tasks: tuple[str, ...]) -> None:
    """A finished sample's tasks went to a worker: a prefix is used there, or for nothing."""
    state = run.world.prefixes
    state.joined.setdefault(worker, time.monotonic())
    if index in state.held and not set(tasks).isdisjoint(prefix_tasks(run.plan.tasks)):
        state.dropped += state.held.pop(index).worker != worker


def scored(run: Run, message: pb.ScoredSample) -> None:
    """A score was taken in: how much of it was there before the sample ended?"""
    if message.task in prefix_tasks(run.plan.tasks):
        state, index = run.world.prefixes, message.key.sample
        state.early_tokens += message.early_tokens
        state.tokens += run.world.prompt_tokens[index] + len(run.world.ledger.samples[index].response)


def annotate(run: Run, span: pb.Span) -> None:
    """A worker's pass: so many tokens of a task took so long."""
    kind, _, task = span.name.partition("/")
    if kind in ("score", "score-prefix") and "tokens" in span.attributes and span.iteration == run.world.iteration:
        line = run.world.prefixes.passes.setdefault(task, Line())
        line.add(float(span.attributes["tokens"]), (span.end_ns - span.start_ns) / 1e9)


def lost(run: Run, worker: str) -> None:
    """A worker is gone, or its session is a new one: it holds nothing."""
    state = run.world.prefixes
    before = len(state.held)
    state.held = {index: item for index, item in state.held.items() if item.worker != worker}
    state.asked = {index: item for index, item in state.asked.items() if item.worker != worker}
    state.dropped += before - len(state.held)
    state.full.pop(worker, None)
    state.cache_bytes.pop(worker, None)


def refused(run: Run, worker: str, failure: pb.Failure) -> None:
    """A worker could not begin: it is asked for nothing more in this iteration."""
    log.warning("%s could not score what is unfinished: %s", worker, failure.message)
    lost(run, worker)
    run.world.prefixes.full[worker] = 0


def figures(run: Run) -> dict[str, float]:
    """What incremental scoring did in an iteration, for its metrics."""
    state = run.world.prefixes
    if not incremental.possible(run.plan):
        return {}
    predicted = {} if state.predicted is None else {"incremental/predicted_gain_seconds": state.predicted}
    return predicted | {
        "incremental/on": float(incremental.on(run.plan, run.world)),
        "incremental/early_share": state.early_tokens / max(1, state.tokens),
        "incremental/dropped": float(state.dropped),
        "incremental/cache_bytes": float(state.most_bytes),
    }
