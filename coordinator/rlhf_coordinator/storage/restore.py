"""The position of a job: from its journal, from a checkpoint if a resume is requested, or the beginning.

A fresh journal next to old checkpoints is refused unless a resume is requested.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rlhf_api.algorithms import (
    has_greedy_baseline,
    prompt_schedule,
    samples_begun,
    samples_of_batch,
    samples_per_prompt,
)
from rlhf_api.algorithms.iteration_prompts import PromptSchedules
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.state.carried_sample import CarriedSample
from rlhf_coordinator.state.evaluation_state import EvaluationResult
from rlhf_coordinator.state.iteration_totals import IterationTotals, read_iteration_totals
from rlhf_coordinator.state.job_state import CheckpointState, JobContext, OpenReport
from rlhf_coordinator.state.ledger import Ledger, interleave_prompt_groups
from rlhf_coordinator.storage import carried_file, checkpoint
from rlhf_coordinator.storage.batch import apply_record, of_evaluation, refill_rule, take_given
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.journal_pb2 import Record
from rlhf_coordinator.storage.prompt_lengths import lengths_after, lengths_of
from rlhf_coordinator.storage.prompts import PromptSet
from rlhf_coordinator.storage.sample_codec import schedules_of
from rlhf_planner import critic_overlap_facts
from rlhf_planner.inter_stage import long_rounds
from rlhf_planner.inter_stage.costs import JOB_KEY

log = logging.getLogger(__name__)

LENGTHS_KEY: Final = "iterations"
"""Key in the facts about the job: its numbers of iterations, each with the first iteration for which it holds."""


@dataclass
class Restored:
    """The state with which a new coordinator process starts."""

    coordinator_epoch: int
    """Number of the job's coordinator processes, this one included."""
    started_ns: int
    ledger: Ledger
    trained: bool
    training_metrics: dict[str, float]
    """Metrics of the training that `trained` represents; empty without one."""
    begun_ns: int | None
    """Begin of the iteration in progress in nanoseconds since the Unix epoch; None before its segment exists."""
    checkpoint: CheckpointState
    rewards: list[float]
    """Mean reward of every closed iteration of the run, NaN without one."""
    last_closed: tuple[int, dict[str, float]] | None
    """(iteration, metrics) of a complete report that the trackers may lack; None without one."""
    warnings: list[str] = field(default_factory=list)
    long_rounds: dict[str, Any] = field(default_factory=dict)
    """Stored choice of long rounds, if any."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """Stored choice of a training schedule, if any."""
    inter_stage: dict[str, Any] = field(default_factory=dict)
    """Stored costs of generation and inference, if any."""
    iteration_totals: IterationTotals = field(default_factory=IterationTotals)
    evaluations: list[EvaluationResult] = field(default_factory=list)
    """Evaluations recorded with the closed iterations of the run."""
    evaluation_records: list[Record] = field(default_factory=list)
    """Journal records of the evaluation in progress."""
    handed_on: tuple[CarriedSample, ...] = ()
    """Samples that the previous iteration, or the checkpoint, hands on to the iteration in progress."""
    expected_lengths: dict[int, int] = field(default_factory=dict)
    """Expected response tokens by line of the prompt file when the iteration began; empty without sorted windows."""
    critic_update_pending: bool = False
    """Whether `trained` covers only the policy."""
    critics_apart: bool = False
    """Whether the iteration in progress chose to train its critics separately."""
    critic_overlap: dict[str, Any] = field(default_factory=dict)
    """Stored training times with and without critic overlap, if any."""
    training_pending: bool = False
    """Whether the iteration was closed before its batch, or its critics, were trained."""
    one_step_off: bool = False
    """Whether an iteration still to begin follows one that was closed before its batch was trained."""
    critics_metrics: dict[str, float] | None = None
    """Metrics of the previous iteration's report, if this segment completes it."""
    open_report: OpenReport | None = None
    """Report of the previous iteration that the earlier process left open; None without one."""
    trained_result: pb.TrainResult = field(default_factory=pb.TrainResult)
    """Result of the training that `trained` represents, with advantages and shaped rewards of each sample."""


def restore(
    context: JobContext,
    journal: Journal,
    prompts: PromptSet,
    prompts_sha256: str,
    now_ns: int,
    *,
    resume: bool,
    read: Mapping[str, str] | None = None,
) -> Restored:
    """Return the position from journal and checkpoints, and make the new coordinator epoch durable. Raises JobError.

    `read`: digests, by name, of the other inputs of prompts.
    """
    facts = journal.job()
    began = "identity" in facts  # a plan for spec.devices is recorded before
    path = Path(context.spec.checkpoints.path) if context.spec.checkpoints else None
    identity = _identity(context, prompts_sha256) | dict(read or {})
    if began:
        _same_job(facts["identity"], identity, journal.folder)
        facts["coordinator_epoch"] += 1
        _take_schedules(context, journal, prompts, path, int(facts["base"]))
        restored = _position(context, journal, prompts, facts)
        version = restored.ledger.iteration + restored.trained
        newest, restored.warnings = checkpoint.discover(path, version) if path else (None, [])
        _take_carried(context, restored, newest, journal, prompts, identity)
    else:
        _may_begin(path, resume)
        newest, warnings = checkpoint.discover(path) if path else (None, [])
        version = newest.version if newest else 0
        facts |= {"coordinator_epoch": 1, "started_ns": now_ns, "identity": identity, "base": version}
        _take_schedules(context, journal, prompts, path, version)
        restored = _position(context, journal, prompts, facts)
        restored.warnings = warnings
        _take_carried(context, restored, newest, journal, prompts, identity)
    restored.checkpoint = _base(version, newest, journal, int(facts["base"]))
    restored.schedule = facts.get("schedule", {})
    restored.long_rounds = facts.get(long_rounds.JOB_KEY, {})
    restored.inter_stage, restored.critic_overlap = facts.get(JOB_KEY, {}), facts.get(critic_overlap_facts.JOB_KEY, {})
    restored.iteration_totals = read_iteration_totals(facts.get(LENGTHS_KEY, ())).now(
        context.spec.iterations, restored.ledger.iteration
    )
    facts[LENGTHS_KEY] = restored.iteration_totals.since
    journal.write_job(facts)
    return restored


def _identity(context: JobContext, prompts_sha256: str) -> dict[str, Any]:
    """Return the fields that must not change while a journal is continued, by manifest path."""
    spec = context.spec
    return {
        "spec.algorithm": spec.algorithm.name,
        "spec.seed": spec.seed,
        "spec.rollout.batchSize": spec.rollout.batch_size,
        "spec.rollout.oversample": spec.rollout.oversample,
        "spec.rollout.maxStaleness": spec.rollout.max_staleness,
        "spec.rollout.longRounds": spec.rollout.long_rounds,
        "spec.rollout.overlapTraining": spec.rollout.overlap_training,
        "samples per prompt": samples_per_prompt(spec),
        "spec.prompts (settings and contents)": prompts_sha256,
        "spec.prompts.shuffle": spec.prompts.shuffle,
        "spec.prompts.lengthWindow": spec.prompts.length_window,
    }


def _same_job(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    """Raise JobError unless the job is the one of the journal. A name that the journal lacks is ignored."""
    for name, value in new.items():
        if name in old and old[name] != value:
            changed = f"{folder} was begun with {name} = {old[name]!r}, now it is {value!r}"
            message = f"{changed}; use a new run folder, or set it back"
            raise JobError("JobChanged", message, field=name, exit_code=ExitCode.USAGE)


def _may_begin(path: Path | None, resume: bool) -> None:
    versions = checkpoint.versions(path) if path else []
    if resume or not versions:
        return
    message = (
        f"{path} already holds checkpoints ({', '.join(f'iteration-{version:06d}' for version in versions)}); "
        "resume from the newest with `--resume` (RLHF_RESUME=1), or set another spec.checkpoints.path"
    )
    raise JobError("CheckpointsExist", message, field=checkpoint.FIELD, exit_code=ExitCode.USAGE)


def _position(context: JobContext, journal: Journal, prompts: PromptSet, facts: dict[str, Any]) -> Restored:
    """Return the iteration in progress, rebuilt from its segment, with the history from the previous segment."""
    segments = journal.iterations()
    iteration = segments[-1] if segments else int(facts["base"])
    restored = _read(context, journal, prompts, facts, iteration)
    if restored.last_closed is not None:
        handed_on = restored.ledger.carry_over()
        after = _read(context, journal, prompts, facts, iteration + 1)
        after.rewards, after.last_closed = restored.rewards, restored.last_closed
        after.evaluations, after.handed_on, after.one_step_off = restored.evaluations, handed_on, restored.one_step_off
        if context.spec.prompts.length_window > 1:
            after.expected_lengths = lengths_after(restored.expected_lengths, restored.ledger, prompts)
        _take_report(after, restored)
        return after
    if iteration - 1 in segments:
        before = _read(context, journal, prompts, facts, iteration - 1)
        restored.rewards, restored.evaluations = before.rewards, before.evaluations
        restored.handed_on = before.ledger.carry_over()
        _take_report(restored, before)
    return restored


def _take_report(restored: Restored, before: Restored) -> None:
    """Restore the report of a previous iteration that was closed before it was trained; this segment may
    complete it."""
    if before.last_closed is None or not before.training_pending:
        return
    iteration, metrics = before.last_closed
    if restored.critics_metrics is None:
        restored.last_closed, restored.open_report = None, OpenReport(iteration, metrics)
    else:
        restored.last_closed = iteration, restored.critics_metrics


def _take_schedules(context: JobContext, journal: Journal, prompts: PromptSet, path: Path | None, base: int) -> None:
    """Restore the schedules that `longRounds: Auto` chose, from the newest segment, else the checkpoint of version
    `base`.
    """
    if context.spec.rollout.long_rounds != "Auto":
        return
    found = None
    for iteration in reversed(journal.iterations()):
        if records := journal.read(iteration):
            found = schedules_of(records[0].begun, context.spec)
            break
    else:
        newest = checkpoint.discover(path, base)[0] if path and base else None
        found = carried_file.read_schedules(newest, context.spec) if newest and newest.version == base else None
    prompts.schedules = found or PromptSchedules((prompt_schedule(context.spec),))


def _take_carried(
    context: JobContext,
    restored: Restored,
    newest: checkpoint.Checkpoint | None,
    journal: Journal,
    prompts: PromptSet,
    identity: dict[str, Any],
) -> None:
    """Restore the carried samples of the checkpoint from which a job resumes, before this run folder has a segment.

    Raises JobError if the checkpoint lacks prompts that wait for a long round.
    """
    if newest is None or journal.iterations() or newest.version != restored.ledger.iteration:
        return
    restored.handed_on, left_out = carried_file.read(newest, identity)
    restored.expected_lengths = carried_file.read_lengths(newest, identity)
    restored.warnings += left_out
    iteration, have = newest.version, len(restored.handed_on) // samples_per_prompt(context.spec)
    wanted = prompts.schedules.at(iteration).waiting(iteration)
    if wanted and have != wanted:
        message = (
            f"{newest.folder} has {have} of the {wanted} prompts that wait for a long round when iteration {iteration} "
            "begins, so it is from a job with another batchSize, oversample, longRounds, seed or other prompts: resume "
            "with the settings of that job, or set spec.rollout.longRounds to Disabled"
        )
        raise JobError("JobChanged", message, field="spec.rollout.longRounds", exit_code=ExitCode.USAGE)


def _read(context: JobContext, journal: Journal, prompts: PromptSet, facts: dict[str, Any], iteration: int) -> Restored:
    epoch = int(facts["coordinator_epoch"])
    spec = context.spec
    records = journal.read(iteration)
    rule = refill_rule(records, spec.algorithm.fields.refill)
    size, per_prompt = samples_begun(spec, prompts.schedules, iteration), samples_per_prompt(spec)
    spare, greedy = size - samples_of_batch(spec), has_greedy_baseline(spec)
    ledger = Ledger(
        iteration, size, context.tasks, epoch, interleave_prompt_groups(spec), per_prompt, rule, spare, greedy
    )
    take_given(ledger, prompts)
    state = Restored(epoch, int(facts["started_ns"]), ledger, False, {}, None, CheckpointState(), [], None)
    for record in records:
        kind = record.WhichOneof("record")
        if kind == "begun":
            state.begun_ns, state.critics_apart = record.begun.time_ns, record.begun.critics_apart
            state.expected_lengths = lengths_of(record.begun.lengths)
            apply_record(ledger, record)
        elif kind == "trained":
            ledger.train()
            state.trained, state.training_metrics = True, dict(record.trained.result.metrics)
            state.critic_update_pending = record.trained.result.critics_behind
            state.trained_result = record.trained.result
        elif kind == "closed":
            state.last_closed = iteration, dict(record.closed.metrics)
            state.one_step_off = record.closed.training_behind
            state.training_pending = record.closed.critics_behind or state.one_step_off
            state.rewards = list(record.closed.rewards)
            state.evaluations = [
                EvaluationResult(evaluation.version, dict(evaluation.metrics))
                for evaluation in record.closed.evaluations
            ]
        elif kind == "critics_trained":
            state.critics_metrics = dict(record.critics_trained.metrics)
        elif of_evaluation(record) is not None:
            state.evaluation_records.append(record)
        else:
            apply_record(ledger, record)
    return state


def _base(version: int, newest: checkpoint.Checkpoint | None, journal: Journal, base: int) -> CheckpointState:
    """Return the checkpoint from which a training group starts.

    Raises JobError when an iteration from there up to the job's version has no segment.
    """
    start = newest.version if newest else 0
    segments = set(journal.iterations())
    missing = [iteration for iteration in range(start, version) if iteration not in segments]
    if missing or (newest is None and base):
        have = f"the newest usable checkpoint is of version {start}" if newest else "there is no usable checkpoint"
        message = f"the job is at version {version}, {have}, and the journal lacks iterations {missing or 'before it'}"
        raise JobError("JournalDamaged", message, field="RLHF_RUN_DIR")
    if newest is None:
        return CheckpointState(newest=start)
    return CheckpointState(newest=start, folder=str(newest.folder), made_ns=newest.made_ns)


def mean(values: list[float]) -> float | None:
    """Return the mean of the finite values; None when there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
