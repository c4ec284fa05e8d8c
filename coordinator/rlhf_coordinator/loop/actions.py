"""Carries out decisions: leases samples, sends commands, writes the journal, ends iterations and the job.

Rule: one function per kind of decision.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from rlhf_api.algorithms import has_greedy_baseline, samples_begun, samples_of_batch, samples_per_prompt
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode, Group
from rlhf_common.samples import SampleKey
from rlhf_coordinator.evaluation import rounds
from rlhf_coordinator.fusion import (
    fusion_planning,
    incremental_scoring,
    learning,
    long_rounds_choice,
    reallocation,
    sample_moves,
)
from rlhf_coordinator.job import measurements, open_report
from rlhf_coordinator.job.commands import send
from rlhf_coordinator.job.iteration_metrics import iteration_metrics, skipped_steps, training_metrics
from rlhf_coordinator.job.iteration_profile import record_facts
from rlhf_coordinator.job.job_run import JobOutcome, JobRun, load_iteration_prompts
from rlhf_coordinator.job.next_samples import expected_lengths, next_samples
from rlhf_coordinator.job.sample_histories import record_histories
from rlhf_coordinator.job.sample_rows import copy_sample_numbers, numbers_by_sample, record_samples
from rlhf_coordinator.job.summary import summary
from rlhf_coordinator.job.timeline_spans import draw_last_phase
from rlhf_coordinator.loop import leases, sample_failures
from rlhf_coordinator.replanning import drift
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling import training_overlap
from rlhf_coordinator.speculation import drafting_ahead, learned, sharing
from rlhf_coordinator.state.carried_sample import CarriedSample
from rlhf_coordinator.state.evaluation_state import latest_metrics, reported_at
from rlhf_coordinator.state.job_state import OpenReport
from rlhf_coordinator.state.ledger import Ledger, interleave_prompt_groups
from rlhf_coordinator.state.worker import CommandKind, PendingCommand
from rlhf_coordinator.storage.batch import take_given
from rlhf_coordinator.storage.journal_pb2 import Begun, Closed, Cut, Evaluated, Record, Refill, Trained
from rlhf_coordinator.storage.prompt_lengths import lengths_message
from rlhf_coordinator.storage.sample_codec import carried_messages, cut_message, key_message, schedule_messages
from rlhf_coordinator.training import critic_overlap_choice, gradient_streaming, schedule_choice
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver, keep_best

log = logging.getLogger(__name__)

TRAINED_MODELS: Final = {
    pb.TRAIN_PART_ALL: "",
    pb.TRAIN_PART_POLICY: "the policy ",
    pb.TRAIN_PART_CRITICS: "the critics ",
}
"""Part of a training that a command requests -> words for messages."""


class Actions:
    """Carries out the decisions of one job."""

    def __init__(self, run: JobRun, checkpoints: CheckpointSaver) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._methods: Mapping[type[Any], Callable[[Any], None]] = {
            d.Generate: partial(leases.generate, run),
            d.Score: partial(leases.score, run),
            d.ScoreGroup: partial(leases.score_group, run),
            d.ScorePrefix: partial(incremental_scoring.request_prefixes, run),
            d.ShareSiblings: partial(sharing.share, run),
            d.DraftAhead: partial(drafting_ahead.lease, run),
            d.EndDrafts: partial(drafting_ahead.end, run),
            d.Migrate: partial(sample_moves.migrate, run),
            d.Withdraw: partial(sample_moves.withdraw, run),
            d.CutGroups: self._cut_groups,
            d.NoteReallocation: partial(reallocation.note, run),
            d.Offload: self._offload,
            d.MeasureCosts: partial(fusion_planning.measure_costs, run),
            d.AdoptCosts: lambda _: fusion_planning.adopt_costs(run),
            d.PrepareWorker: self._prepare_worker,
            d.FormGroup: self._form_group,
            d.MeasureSchedule: lambda _: schedule_choice.measure_schedules(run),
            d.Train: self._train,
            d.StreamGroups: partial(gradient_streaming.stream_groups, run),
            d.Accumulate: partial(gradient_streaming.accumulate, run),
            d.ExitWorker: self._exit_worker,
            d.RestartGroup: self._restart_group,
            d.CommitBatch: lambda _: run.journal.commit(),
            d.CommitTrained: self._commit_trained,
            d.ReportCritics: lambda _: critic_overlap_choice.critics_trained(run, open_report.complete(run)),
            d.SaveCheckpoint: lambda decision: checkpoints.begin(decision.version),
            d.CloseIteration: self._close_iteration,
            d.BeginEvaluation: lambda decision: rounds.begin(run, decision.version),
            d.GiveUpEvaluation: lambda decision: rounds.give_up(run, decision.version),
            d.Finish: self._finish,
        }

    def carry_out(self, decision: d.Decision) -> None:
        """Carry out one decision. Raises JobError, for example when the journal cannot be written."""
        self._methods[type(decision)](decision)

    def begin_iteration(
        self, iteration: int, handed_on: Sequence[CarriedSample], *, one_step_off: bool = False
    ) -> None:
        """Begin an iteration that has no segment in the journal yet.

        `handed_on`: samples that earlier iterations cut off and none took up yet. `one_step_off`: the batch of the
        previous iteration is not trained yet.
        """
        run = self._run
        spec = run.context.spec
        rule = spec.algorithm.fields.refill
        begun = Begun(iteration=iteration, coordinator_epoch=run.coordinator_epoch, time_ns=time.time_ns())
        begun.critics_apart = critic_overlap_choice.begin_iteration(run, iteration)
        if rule.rounds:
            begun.refill.CopyFrom(Refill(rounds=rule.rounds, used_up=rule.used_up))
        schedules = long_rounds_choice.next_schedules(run, iteration)
        begun.schedules.extend(schedule_messages(schedules, spec))
        run.state.expected_lengths = expected = expected_lengths(run, iteration)
        carried, waiting = next_samples(run, iteration, handed_on, schedules, expected)
        size = samples_begun(spec, schedules, iteration)
        begun.carried.extend(carried_messages(carried))
        begun.waiting.extend(carried_messages(waiting))
        if expected:
            begun.lengths.CopyFrom(lengths_message(expected))
        begun.versions_behind = int(one_step_off)
        run.journal.begin(begun)
        long_rounds_choice.adopt(run, iteration, schedules)
        ledger = Ledger(
            iteration,
            size,
            run.context.tasks,
            run.coordinator_epoch,
            interleave_prompt_groups(spec),
            samples_per_prompt(spec),
            rule,
            size - samples_of_batch(spec),
            has_greedy_baseline(spec),
        )
        run.state.ledger = take_given(ledger, run.prompts)
        run.state.ledger.version = iteration - one_step_off
        run.state.ledger.resume_partial(carried, waiting)
        load_iteration_prompts(run.state, run.prompts)
        run.state.trained = run.state.critic_update_pending = run.state.refill_told = False
        run.state.overlaps_training = training_overlap.overlaps_training(run.context, iteration)
        run.state.groups_dropped = 0
        run.training_metrics, run.advantages, run.shaped_rewards = {}, (), ()
        run.state.incremental.begin_iteration()
        run.state.siblings.begin_iteration()
        gradient_streaming.begin_iteration(run)
        run.state.speculation.begin_iteration()
        run.state.ahead.begin_iteration(iteration)
        fusion_planning.begin_iteration(run)
        rounds.begin_iteration(run)

    # ---------------------------------------------------------------- samples

    def _cut_groups(self, decision: d.CutGroups) -> None:
        """Journal the cut, apply it to the ledger, and let workers drop its samples."""
        run, ledger = self._run, self._run.state.ledger
        cut = Cut(groups=decision.groups)
        if run.context.spec.rollout.max_staleness:
            members = [sample for group in decision.groups for sample in ledger.members_of(group)]
            begun = [sample for sample in members if sample.unfinished and len(sample.response)]
            cut.known.extend(cut_message(ledger.iteration, sample) for sample in begun)
        run.journal.append(Record(cut=cut))
        for index, lease in ledger.cut(decision.groups):
            key = key_message(SampleKey(ledger.iteration, index, lease.attempt))
            sample_moves.reclaim_fenced(run, lease.worker, key)

    # ---------------------------------------------------------------- workers

    def _prepare_worker(self, decision: d.PrepareWorker) -> None:
        pending = PendingCommand(
            CommandKind.LOAD if decision.model else CommandKind.BECOME,
            0.0,
            decision.detail,
            version=decision.version,
            model=decision.model,
            from_ranks=decision.from_ranks,
            role=str(decision.command.WhichOneof("command")).removeprefix("become_"),
        )
        send(self._run, decision.worker, decision.command, pending)

    def _offload(self, decision: d.Offload) -> None:
        self._run.state.fleet.workers[decision.worker].scorer_onloaded = False
        detail = f"offload its {decision.role} models"
        send(
            self._run,
            decision.worker,
            pb.Command(offload=pb.Offload(role=decision.role)),
            PendingCommand(CommandKind.OFFLOAD, 0.0, detail),
        )

    def _form_group(self, decision: d.FormGroup) -> None:
        run, state = self._run, self._run.state.checkpoint
        group = run.state.fleet.ranks()
        run.state.group_epoch = decision.group_epoch
        for number, rank in enumerate(group):
            rank.group_epoch, rank.schedule_table = decision.group_epoch, self._table
            order = pb.BecomeTraining(
                rank=number,
                world_size=len(group),
                rendezvous=group[0].rendezvous,
                group_epoch=decision.group_epoch,
                schedule=rank.schedule_table,
                checkpoint=state.folder,
                version=state.newest,
            )
            detail = f"join training group {decision.group_epoch} at version {state.newest}"
            pending = PendingCommand(CommandKind.BECOME, 0.0, detail, version=state.newest, role=Group.TRAINING)
            send(run, rank.name, pb.Command(become_training=order), pending)
        text = f"training group {decision.group_epoch} of {len(group)} ranks forms at version {state.newest}"
        log.info(text)
        run.event("training-group", text)

    def _train(self, decision: d.Train) -> None:
        rank = self._run.state.fleet.workers[decision.worker]
        order = pb.Train(
            iteration=decision.iteration,
            iterations=self._run.state.iteration_totals.iterations_at(decision.iteration),
            part=decision.part,
            keep=decision.keep,
        )
        if rank.schedule_table != self._table:
            rank.schedule_table = order.schedule = self._table
        models = TRAINED_MODELS[decision.part]
        detail = f"train {models}on iteration {decision.iteration}"
        send(
            self._run,
            rank.name,
            pb.Command(train=order),
            PendingCommand(CommandKind.TRAIN, 0.0, detail, role=Group.TRAINING),
        )
        self._run.state.ever_ready = True

    @property
    def _table(self) -> str:
        return self._run.state.schedule.table or self._run.context.schedule

    def _exit_worker(self, decision: d.ExitWorker) -> None:
        worker = self._run.state.fleet.workers[decision.worker]
        order = pb.Exit(code=decision.code, reason=decision.reason)
        self._run.sessions.send(worker.name, pb.CoordinatorMessage(command=pb.Command(exit=order)))
        if decision.stuck:
            sample_failures.worker_ended(self._run, worker, decision.reason)
        worker.leaving, worker.blameless, worker.since = True, True, time.monotonic()
        if decision.code:
            log.warning("%s is asked to restart: %s", worker.name, decision.reason)
            self._run.event("worker-restart-asked", decision.reason, worker=worker.name)

    def _restart_group(self, decision: d.RestartGroup) -> None:
        run = self._run
        run.totals.group_restarts += 1
        run.state.group_failures += decision.counted
        for name in decision.members:
            self._checkpoints.lost(name)

    # ---------------------------------------------------------------- iterations

    def _commit_trained(self, decision: d.CommitTrained) -> None:
        run = self._run
        behind = any(rank.critic_update_pending for rank in run.state.fleet.ranks())
        metrics = {} if behind else training_metrics(run, run.state.iteration)
        if warning := skipped_steps(metrics, run.state.iteration):
            log.warning(warning)
            run.event("steps-skipped", warning)
        result = pb.TrainResult(iteration=run.state.iteration, version=run.state.iteration + 1, metrics=metrics)
        copy_sample_numbers(run, result)
        result.critics_behind = run.state.critic_update_pending = behind
        run.state.ledger.train()
        run.journal.append(Record(trained=Trained(result=result, time_ns=time.time_ns())))
        run.journal.commit()
        critic_overlap_choice.trained(run, metrics)
        run.training_metrics = metrics
        run.advantages = numbers_by_sample(result.advantages)
        run.shaped_rewards = numbers_by_sample(result.shaped_rewards)
        run.state.trained = True
        run.state.group_failures = 0

    def _close_iteration(self, decision: d.CloseIteration) -> None:
        run, iteration = self._run, self._run.state.iteration
        learning.learn(run)
        long_rounds_choice.iteration_scored(run)
        sharing.iteration_ended(run)
        rounds.record(run)
        if decision.awaits == "training":
            run.state.ledger.train()
        if decision.late_critics:
            run.training_metrics = training_metrics(run, iteration)
        draw_last_phase(run, time.monotonic(), time.time_ns())
        metrics = iteration_metrics(run, time.monotonic())
        evaluated = reported_at(run.state.evaluation.results, iteration)
        last_version = reported_at(run.state.evaluation.results, iteration + 1)
        metrics |= evaluated
        if evaluated or last_version:
            keep_best(run)
        learned.iteration_ended(run, time.monotonic())
        critic_overlap_choice.iteration_ended(run, metrics["seconds/publish"])
        run.rewards.append(metrics.get("reward", math.nan))
        results = [Evaluated(version=result.version, metrics=result.metrics) for result in run.state.evaluation.results]
        closed = Closed(metrics=metrics, time_ns=time.time_ns(), rewards=run.rewards, evaluations=results)
        closed.critics_behind, closed.training_behind = decision.awaits == "critics", decision.awaits == "training"
        run.journal.append(Record(closed=closed))
        run.journal.commit()
        self._report(decision, metrics, last_version)
        if not decision.last:
            drift.iteration_ended(run)
            if not decision.awaits:
                drift.adopt_at_checkpoint(run)
            run.times.begin_iteration(time.monotonic())
            self.begin_iteration(
                iteration + 1, run.state.ledger.carry_over(), one_step_off=decision.awaits == "training"
            )

    def _report(self, decision: d.CloseIteration, metrics: dict[str, float], last_version: dict[str, float]) -> None:
        """Report a closed iteration; while training is awaited, trackers do not get its metrics.

        `last_version`: metrics of the evaluation of the version after this iteration, or empty.
        """
        run, iteration = self._run, self._run.state.iteration
        record_samples(run)
        record_histories(run)
        if decision.awaits:
            run.state.open_report = OpenReport(iteration, metrics)
            trained = "it trains" if decision.awaits == "training" else "its critics train"
            run.event(f"{decision.awaits}-behind", f"iteration {iteration} is closed; {trained} beside the next one")
        else:
            run.trackers.iteration(iteration, metrics)
        if last_version:
            run.trackers.evaluation(iteration + 1, last_version)
        record_facts(run, metrics | last_version)
        run.last_metrics = metrics | latest_metrics(run.state.evaluation.results)
        measurements.iteration_finished(run, metrics["seconds/iteration"])
        log.info(
            "iteration %d (%d of %d): reward %s, %.1f samples/s, %.1f s",
            iteration,
            iteration + 1,
            run.context.spec.iterations,
            f"{metrics['reward']:.4g}" if "reward" in metrics else "none",
            metrics["samples_per_second"],
            metrics["seconds/iteration"],
        )

    def _finish(self, decision: d.Finish) -> None:
        run = self._run
        if run.outcome is not None:
            return
        run.outcome = JobOutcome(decision.phase, decision.failure)
        reason = decision.failure.message if decision.failure else f"the job is {decision.phase.lower()}"
        waiting = round(run.last_metrics.get("prompts/waiting", 0.0))
        if decision.phase == "Complete" and waiting:
            text = f"{waiting} prompts that were cut off are not trained on: no long round is left"
            log.warning(text)
            run.event("prompts-waiting", text)
        for worker in run.state.fleet:
            if worker.session:
                self._exit_worker(d.ExitWorker(worker.name, ExitCode.OK, reason))
        run.trackers.finish(summary(run, samples_per_prompt(run.context.spec)))
        run.over.set()
