"""Carries out decisions: leases samples, sends commands, writes the journal, ends iterations and the job.

Rule: one small method per kind of decision, called in the order of the decisions; what to do was decided before, by the
scheduler alone.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms import samples_per_prompt
from rlhf_api.names import ExitCode, Group
from rlhf_api.samples import SampleKey
from rlhf_coordinator.fusion import fusion_planning, incremental_scoring, learning, sample_moves
from rlhf_coordinator.job.commands import send
from rlhf_coordinator.job.iteration_metrics import iteration_metrics, skipped_steps, training_metrics
from rlhf_coordinator.job.job_run import JobOutcome, JobRun, load_iteration_prompts
from rlhf_coordinator.job.summary import summary
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.worker import CommandKind, PendingCommand
from rlhf_coordinator.storage.journal_pb2 import Begun, Closed, Record, Trained
from rlhf_coordinator.storage.prompts import random_key
from rlhf_coordinator.storage.sample_codec import generate_sample, score_sample
from rlhf_coordinator.training import schedule_choice
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver

log = logging.getLogger(__name__)


class Actions:
    """Carries out the decisions of one job."""

    def __init__(self, run: JobRun, checkpoints: CheckpointSaver) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._methods: Mapping[type[Any], Callable[[Any], None]] = {
            d.Generate: self._generate,
            d.Score: self._score,
            d.ScorePrefix: partial(incremental_scoring.request_prefixes, run),
            d.Migrate: partial(sample_moves.migrate, run),
            d.Withdraw: partial(sample_moves.withdraw, run),
            d.Offload: self._offload,
            d.MeasureCosts: partial(fusion_planning.measure_costs, run),
            d.AdoptCosts: lambda _: fusion_planning.adopt_costs(run),
            d.PrepareWorker: self._prepare_worker,
            d.FormGroup: self._form_group,
            d.MeasureSchedule: lambda _: schedule_choice.measure_schedules(run),
            d.Train: self._train,
            d.ExitWorker: self._exit_worker,
            d.RestartGroup: self._restart_group,
            d.CommitBatch: lambda _: run.journal.commit(),
            d.CommitTrained: self._commit_trained,
            d.SaveCheckpoint: lambda decision: checkpoints.begin(decision.version),
            d.CloseIteration: self._close_iteration,
            d.Finish: self._finish,
        }

    def carry_out(self, decision: d.Decision) -> None:
        """Carry out one decision. Raises JobError when the journal cannot be written."""
        self._methods[type(decision)](decision)

    def begin_iteration(self, iteration: int) -> None:
        """Begin an iteration of which the journal has no segment yet."""
        run = self._run
        run.journal.begin(Begun(iteration=iteration, coordinator_epoch=run.coordinator_epoch, time_ns=time.time_ns()))
        spec = run.context.spec
        run.state.ledger = Ledger(iteration, spec.rollout.batch_size, run.context.tasks, run.coordinator_epoch)
        load_iteration_prompts(run.state, run.prompts)
        run.state.trained = False
        run.training_metrics = {}
        run.state.incremental.begin_iteration()
        fusion_planning.begin_iteration(run)

    # ---------------------------------------------------------------- samples

    def _generate(self, decision: d.Generate) -> None:
        run = self._run
        samples = [self._generate_sample(index, decision.worker) for index in decision.samples]
        command = pb.Command(generate=pb.Generate(samples=samples))
        send(run, decision.worker, command, PendingCommand(CommandKind.GENERATE, 0.0, f"take {len(samples)} samples"))
        run.state.ever_ready = True

    def _generate_sample(self, index: int, worker: str) -> pb.GenerateSample:
        run, ledger = self._run, self._run.state.ledger
        known = ledger.samples[index].response
        attempt = ledger.assign(index, worker)
        incremental_scoring.decoding_started(run, index)
        return generate_sample(
            SampleKey(ledger.iteration, index, attempt),
            run.prompts.of(ledger.iteration, index).tokens,
            known,
            random_key(run.context.spec.seed, ledger.iteration, index),
            run.context.spec.rollout.max_response_tokens,
        )

    def _score(self, decision: d.Score) -> None:
        run, ledger = self._run, self._run.state.ledger
        samples = []
        for index, tasks in decision.samples:
            attempt = ledger.assign_scores(index, tasks, decision.worker)
            incremental_scoring.scoring_assigned(run, index, decision.worker, tasks)
            sample, prompt = ledger.samples[index], run.prompts.of(ledger.iteration, index)
            key = SampleKey(ledger.iteration, index, attempt)
            samples.append(score_sample(key, tasks, prompt.tokens, prompt.text, prompt.record, sample))
        command = pb.Command(score=pb.Score(samples=samples))
        send(
            run,
            decision.worker,
            command,
            PendingCommand(CommandKind.SCORE, 0.0, f"take {len(samples)} samples to score"),
        )
        run.state.fleet.workers[decision.worker].scorer_onloaded = True

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
            iteration=decision.iteration, iterations=self._run.state.iteration_totals.iterations_at(decision.iteration)
        )
        if rank.schedule_table != self._table:
            rank.schedule_table = order.schedule = self._table
        detail = f"train on iteration {decision.iteration}"
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
        worker.leaving, worker.since = True, time.monotonic()
        if decision.code:
            log.warning("%s is asked to restart: %s", worker.name, decision.reason)
            self._run.event("worker-restart-asked", decision.reason, worker=worker.name)

    def _restart_group(self, decision: d.RestartGroup) -> None:
        run = self._run
        run.totals.group_restarts += 1
        run.state.group_failures += decision.counted
        for name in decision.members:
            self._checkpoints.lost(name)
            self._exit_worker(d.ExitWorker(name, ExitCode.RESTART, f"the training group restarts: {decision.reason}"))

    # ---------------------------------------------------------------- iterations

    def _commit_trained(self, decision: d.CommitTrained) -> None:
        run = self._run
        metrics = training_metrics(run)
        if warning := skipped_steps(metrics, run.state.iteration):
            log.warning(warning)
            run.event("steps-skipped", warning)
        result = pb.TrainResult(iteration=run.state.iteration, version=run.state.iteration + 1, metrics=metrics)
        run.state.ledger.train()
        run.journal.append(Record(trained=Trained(result=result, time_ns=time.time_ns())))
        run.journal.commit()
        run.training_metrics = metrics
        run.state.trained = True
        run.state.group_failures = 0

    def _close_iteration(self, decision: d.CloseIteration) -> None:
        run, iteration = self._run, self._run.state.iteration
        learning.learn(run)
        metrics = iteration_metrics(run, time.monotonic())
        moved = run.state.fusion.moved
        run.totals.moved_kv += moved.kv
        run.totals.moved_tokens += moved.tokens
        run.totals.moved_bytes += moved.bytes
        run.rewards.append(metrics.get("reward", math.nan))
        run.journal.append(Record(closed=Closed(metrics=metrics, time_ns=time.time_ns(), rewards=run.rewards)))
        run.journal.commit()
        run.trackers.iteration(iteration, metrics)
        run.last_metrics = metrics
        log.info(
            "iteration %d/%d: reward %s, %.1f samples/s, %.1f s",
            iteration + 1,
            run.context.spec.iterations,
            f"{metrics['reward']:.4g}" if "reward" in metrics else "none",
            metrics["samples_per_second"],
            metrics["seconds/iteration"],
        )
        if not decision.last:
            run.times.begin_iteration(time.monotonic())
            self.begin_iteration(iteration + 1)

    def _finish(self, decision: d.Finish) -> None:
        run = self._run
        if run.outcome is not None:
            return
        run.outcome = JobOutcome(decision.phase, decision.failure)
        reason = decision.failure.message if decision.failure else f"the job is {decision.phase.lower()}"
        for worker in run.state.fleet:
            if worker.session:
                self._exit_worker(d.ExitWorker(worker.name, ExitCode.OK, reason))
        run.trackers.finish(summary(run, samples_per_prompt(run.context.spec)))
        run.over.set()
