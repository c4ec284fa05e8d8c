"""The life of an evaluation: it begins with a version, and is recorded or abandoned.

Samples that an earlier coordinator journaled are reused.
"""

import logging
import time

from rlhf_coordinator.evaluation.figures import evaluation_metrics
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.state.evaluation_state import FIRST_SAMPLE, EvaluationResult, evaluation_tasks
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.storage.batch import of_evaluation, restore_record

log = logging.getLogger(__name__)


def begin_iteration(run: JobRun) -> None:
    """Begin the evaluation of the iteration's version where one is due or was deferred."""
    settings, state = run.context.spec.evaluation, run.state
    if settings is None or not (
        state.evaluation.deferred or settings.due(state.iteration, run.context.spec.iterations)
    ):
        return
    begin(run, state.iteration)


def begin(run: JobRun, version: int) -> None:
    """Begin the evaluation of a version; an earlier one is recorded first if it is complete, and abandoned if not."""
    settings, evaluation = run.context.spec.evaluation, run.state.evaluation
    assert settings is not None
    record(run)
    size = len(run.evaluation_prompts) * settings.samples_per_prompt
    ledger = Ledger(version, size, evaluation_tasks(run.context.graph), run.coordinator_epoch)
    for journaled in run.evaluation_records:
        if of_evaluation(journaled) == version:
            restore_record(ledger, journaled, FIRST_SAMPLE)
    evaluation.ledger, evaluation.deferred = ledger, False
    evaluation.begun, evaluation.ended, evaluation.waited, evaluation.waits_since = time.monotonic(), 0.0, 0.0, 0.0
    evaluation.before_training = run.context.spec.placement == "Colocated" and version == run.state.iteration
    log.info("weight version %d is evaluated on %d prompts, %d responses", version, len(run.evaluation_prompts), size)


def note_wait(run: JobRun, now: float) -> None:
    """Update the end of the evaluation, and the time for which the iteration waits for it.

    `now`: seconds of the monotonic clock.
    """
    evaluation = run.state.evaluation
    if evaluation.ledger is not None and not evaluation.unfinished and not evaluation.ended:
        evaluation.ended = now
    if run.scheduled.waits_for_evaluation:
        evaluation.waits_since = evaluation.waits_since or now
    elif evaluation.waits_since:
        evaluation.waited += now - evaluation.waits_since
        evaluation.waits_since = 0.0


def record(run: JobRun) -> EvaluationResult | None:
    """Store the result of a complete evaluation, and return it. Abandon an incomplete one, and return None."""
    settings, evaluation = run.context.spec.evaluation, run.state.evaluation
    ledger = evaluation.ledger
    if settings is None or ledger is None:
        return None
    if not ledger.all_scored:
        _drop(run, "the job was asked to stop")
        return None
    note_wait(run, time.monotonic())
    field = run.context.graph.reward_fields[0]
    metrics = evaluation_metrics(ledger, settings.samples_per_prompt, settings.pass_reward, field)
    metrics["seconds"] = max(0.0, evaluation.ended - evaluation.begun)
    metrics["waited_seconds"] = evaluation.waited
    result = EvaluationResult(ledger.iteration, metrics)
    evaluation.results.append(result)
    evaluation.ledger = None
    shown = f"reward {metrics['reward']:.4g}" if "reward" in metrics else "no reward"
    log.info("weight version %d is evaluated: %s", result.version, shown)
    return result


def give_up(run: JobRun, version: int) -> None:
    """Abandon the evaluation in progress, because no worker has its version. The next iteration, if any, evaluates its
    own version instead."""
    _drop(run, "no worker holds these weights any more")
    run.state.evaluation.deferred = True
    run.totals.evaluations_given_up += 1


def _drop(run: JobRun, why: str) -> None:
    ledger = run.state.evaluation.ledger
    assert ledger is not None
    run.state.evaluation.ledger = None
    text = f"the evaluation of weight version {ledger.iteration} is given up: {why}"
    log.warning("%s", text)
    run.event("evaluation-given-up", text)
