"""The return of a coordinator from its journal, step by step. A first start takes the same steps with an empty journal.

  open_journal      1. lock the journal
  open_run          2. read the stored tokenized prompts, or tokenize and store them
    restore_run     3. restore the state from journal and checkpoints (`storage.restore`)
                    4. open the trackers
                    5. build the job's parts
  resume_iteration  6. restore what earlier iterations learned
                    7. continue the iteration in progress, or begin the next one

When the process dies in here, the next one takes the same steps.
"""

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rlhf_api.algorithms import prompt_schedule, samples_per_prompt
from rlhf_coordinator.evaluation import rounds
from rlhf_coordinator.fusion import fusion_planning, learning, long_rounds_choice
from rlhf_coordinator.job.histograms import JobHistograms
from rlhf_coordinator.job.iteration_times import IterationTimes
from rlhf_coordinator.job.job_run import JobRun, load_iteration_prompts
from rlhf_coordinator.job.sample_rows import numbers_by_sample
from rlhf_coordinator.job.sessions import Sessions
from rlhf_coordinator.loop.actions import Actions
from rlhf_coordinator.replanning import drift
from rlhf_coordinator.reports.trackers.open_traces import open_traces
from rlhf_coordinator.reports.trackers.run_trackers import RunTrackers, open_trackers
from rlhf_coordinator.reports.trackers.services import services_of
from rlhf_coordinator.scheduling import training_overlap
from rlhf_coordinator.scheduling.training_schedule import candidates, question
from rlhf_coordinator.speculation import learned, sharing
from rlhf_coordinator.state.critic_overlap_state import CriticOverlapState
from rlhf_coordinator.state.evaluation_state import latest_metrics, reported_at
from rlhf_coordinator.state.fleet import Fleet
from rlhf_coordinator.state.fusion_state import fusion_state
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.storage import checkpoint
from rlhf_coordinator.storage.job_prompts import PromptReader
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.journal_lock import hold
from rlhf_coordinator.storage.prompt_cache import keep_tokenized, tokenized_before
from rlhf_coordinator.storage.prompts import Prompt, PromptSet, prompts_digest
from rlhf_coordinator.storage.restore import Restored, restore
from rlhf_coordinator.storage.tokenizer_files import IDENTITY, tokenizer_digest
from rlhf_coordinator.training import critic_overlap_choice

log = logging.getLogger("coordinator")

COMMANDS_PER_COORDINATOR: Final = 1 << 32
"""Number of command ids per coordinator; the first one is the coordinator's epoch times this, plus 1."""


def open_journal(run_dir: Path) -> Journal:
    """Take step 1 in a run folder; return its journal. Raises JobError."""
    return Journal(run_dir / "journal", hold(run_dir / "journal"))


def open_run(context: JobContext, journal: Journal, run_dir: Path, *, resume: bool) -> tuple[JobRun, Restored]:
    """Take steps 2 to 5 in a run folder; return the job's parts and the restored state. Raises JobError.

    `resume`: a new journal may continue from existing checkpoints.
    """
    digest = prompts_digest(context.spec)
    prompts = read_prompt_set(context, journal, digest)
    evaluated = read_evaluation_prompts(context, journal, prompts)
    run, restored = restore_run(context, journal, prompts, digest, run_dir, resume=resume, read=_read_with(context))
    run.evaluation_prompts = evaluated
    _warn_of_prompts(run)
    _warn_of_window(run)
    if context.spec.checkpoints is not None:
        checkpoint.remove_leftovers(Path(context.spec.checkpoints.path))
    return run, restored


def _warn_of_prompts(run: JobRun) -> None:
    evaluated = run.evaluation_prompts[:1]
    for text in dict.fromkeys([*run.prompts.warnings, *(text for prompt in evaluated for text in prompt.warnings)]):
        run.warn("prompt-warning", text)
    left_out = run.prompts.filtered
    if count := sum(left_out):
        text = f"{count} of {count + len(run.prompts)} prompts are longer than spec.rollout allows, and are left out"
        if sources := run.context.spec.prompts.sources:
            text += f": {', '.join(f'{source.name} {n}' for source, n in zip(sources, left_out, strict=True))}"
        run.warn("prompts-left-out", text)


def _warn_of_window(run: JobRun) -> None:
    """Warn about sorted windows in a job that reads no prompt twice."""
    spec = run.context.spec
    if spec.prompts.length_window > 1 and run.prompts.epoch(spec.iterations - 1) == 0:
        text = (
            f"spec.prompts.lengthWindow is {spec.prompts.length_window}, but sorts nothing: {spec.iterations} "
            f"iterations begin no more than the {len(run.prompts)} prompts, so no length is known before"
        )
        run.warn("length-window", text)


def _read_with(context: JobContext) -> dict[str, str]:
    """Return digests of the other inputs of tokenized prompts: local tokenizer files, and evaluation prompts."""
    spec = context.spec
    tokenizer = tokenizer_digest(spec.models.actor.path)
    read = {} if tokenizer is None else {IDENTITY: tokenizer}
    if spec.evaluation is not None and (held_out := spec.evaluation.held_out(spec.prompts)) is not None:
        read["spec.evaluation.prompts (settings and contents)"] = prompts_digest(spec, held_out)
    return read


def restore_run(
    context: JobContext,
    journal: Journal,
    prompts: PromptSet,
    prompts_sha256: str,
    run_dir: Path,
    *,
    resume: bool = False,
    trackers: RunTrackers | None = None,
    read: Mapping[str, str] | None = None,
) -> tuple[JobRun, Restored]:
    """Take steps 3 to 5; return the job's parts and the restored state. Raises JobError.

    `trackers` replace those of the run folder; `read` is as for `restore`.
    """
    restored = restore(context, journal, prompts, prompts_sha256, time.time_ns(), resume=resume, read=read)
    for warning in restored.warnings:
        log.warning(warning)
    closed = restored.last_closed
    first = closed[0] if closed else restored.ledger.iteration
    if restored.open_report is not None:
        first = restored.open_report.iteration
    trackers = trackers or open_trackers(
        run_dir, first, services=services_of(context.job), traces=open_traces(context.job, run_dir)
    )
    if closed:  # the previous process may have died between journal and trackers
        trackers.iteration(*closed)
        last_version = closed[0] + 1
        if last_version >= context.spec.iterations and (ended := reported_at(restored.evaluations, last_version)):
            trackers.evaluation(last_version, ended)
    return _job_run(context, restored, journal, prompts, trackers), restored


def resume_iteration(run: JobRun, restored: Restored, actions: Actions) -> None:
    """Take steps 6 and 7. Raises JobError."""
    learning.restore_learned(run, restored.inter_stage)
    long_rounds_choice.restore(run, restored.long_rounds)
    critic_overlap_choice.restore_measured(run, restored.critic_overlap)
    learned.restore_learned_drafts(run)
    sharing.restore_earlier(run)
    drift.begin(run)
    if restored.begun_ns is None:
        actions.begin_iteration(restored.ledger.iteration, restored.handed_on, one_step_off=restored.one_step_off)
    else:
        run.journal.resume(restored.ledger.iteration)
        run.state.groups_dropped = len(restored.ledger.refill.dropped)
        fusion_planning.begin_iteration(run)
        rounds.begin_iteration(run)
    log.info("job %s: iteration %d, start %d", run.context.job.name, run.state.iteration, run.coordinator_epoch)


def read_evaluation_prompts(context: JobContext, journal: Journal, prompts: PromptSet) -> Sequence[Prompt]:
    """Return the prompts of the evaluation; empty without one. Raises JobError."""
    spec, settings = context.spec, context.spec.evaluation
    if settings is None:
        return ()
    held_out = settings.held_out(spec.prompts)
    if held_out is None:
        return prompts.first(settings.prompt_count)
    digest = prompts_digest(spec, held_out)
    own = tokenized_before(journal, digest)
    if own is None:
        own = PromptReader(spec).evaluation()
        keep_tokenized(journal, digest, own)
    return own[: settings.prompt_count]


def read_prompt_set(context: JobContext, journal: Journal, digest: str) -> PromptSet:
    """Return the tokenized prompts of a job, as the journal's folder stores them, or tokenized and stored now.

    Raises JobError.
    """
    spec = context.spec
    per_prompt = samples_per_prompt(spec)
    prompts = tokenized_before(journal, digest)
    if prompts is None:
        prompts = PromptReader(spec).training()
        keep_tokenized(journal, digest, prompts)
    return PromptSet(
        prompts,
        seed=spec.seed,
        shuffle=spec.prompts.shuffle,
        schedule=prompt_schedule(spec),
        samples_per_prompt=per_prompt,
        weights=[file.weight for file in spec.prompts.files],
        length_window=spec.prompts.length_window,
    )


def _job_run(
    context: JobContext, restored: Restored, journal: Journal, prompts: PromptSet, trackers: RunTrackers
) -> JobRun:
    """Build the parts of the job. Convert stored wall-clock times into this process's monotonic clock."""
    now, now_ns = time.monotonic(), time.time_ns()
    begun_ns = now_ns if restored.begun_ns is None else restored.begun_ns
    return JobRun(
        context=context,
        state=_state(context, restored, prompts, now, now_ns),
        journal=journal,
        prompts=prompts,
        trackers=trackers,
        sessions=Sessions(),
        times=IterationTimes(now - max(0.0, (now_ns - begun_ns) / 1e9), phase_start=now),
        coordinator_epoch=restored.coordinator_epoch,
        started_ns=restored.started_ns,
        evaluation_records=restored.evaluation_records,
        rewards=restored.rewards,
        training_metrics=restored.training_metrics,
        advantages=numbers_by_sample(restored.trained_result.advantages),
        shaped_rewards=numbers_by_sample(restored.trained_result.shaped_rewards),
        last_metrics=(restored.last_closed[1] if restored.last_closed else {}) | latest_metrics(restored.evaluations),
        histograms=JobHistograms(enabled=context.spec.metrics == "Enabled"),
        command_ids=itertools.count(restored.coordinator_epoch * COMMANDS_PER_COORDINATOR + 1),
    )


def _state(context: JobContext, restored: Restored, prompts: PromptSet, now: float, now_ns: int) -> JobState:
    state = JobState(
        Fleet(context.spec, now),
        restored.ledger,
        fusion_state(context.spec),
        trained=restored.trained,
        critic_update_pending=restored.critic_update_pending,
        overlaps_training=training_overlap.overlaps_training(context, restored.ledger.iteration),
        open_report=restored.open_report,
        critic_overlap=CriticOverlapState(restored.critics_apart, beside=restored.open_report is not None),
        checkpoint=restored.checkpoint,
        iteration_totals=restored.iteration_totals,
        expected_lengths=restored.expected_lengths,
    )
    state.ahead.begin_iteration(state.iteration)
    state.evaluation.results = list(restored.evaluations)
    load_iteration_prompts(state, prompts)
    if restored.schedule.get("question") == question(context.spec, context.schedule):
        state.schedule.take(restored.schedule)
    elif candidates(context.spec):
        state.schedule.stage = "stages"
    deadline = context.spec.run_policy.active_deadline_seconds
    if deadline is not None:
        state.deadline = now + deadline - (now_ns - restored.started_ns) / 1e9
    return state
