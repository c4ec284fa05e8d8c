"""Saves one checkpoint at a time: ranks write into a folder, and a thread completes it.

After MAX_TRIES failed attempts in a row the job fails. An attempt that a lost rank ends does not count as failed.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rlhf_api.algorithms import samples_per_prompt
from rlhf_api.algorithms.iteration_prompts import PromptSchedules
from rlhf_common import control_pb2 as pb
from rlhf_common.metrics import storage
from rlhf_common.names import DRAFT_MODEL, ExitCode
from rlhf_common.surrogates import escaped
from rlhf_coordinator.failures import JobError, storage_error
from rlhf_coordinator.job.commands import send
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.next_samples import expected_lengths
from rlhf_coordinator.state.carried_sample import CarriedSample
from rlhf_coordinator.state.evaluation_state import EvaluationState, best
from rlhf_coordinator.state.worker import CommandKind, PendingCommand
from rlhf_coordinator.storage import carried_file, checkpoint
from rlhf_coordinator.storage.sample_codec import schedule_messages

log = logging.getLogger(__name__)

MAX_TRIES: Final = 3
"""Consecutive failed attempts that end the job."""
RETRY_SECONDS: Final = 2.0
"""Least seconds from a failed attempt to the next."""


class CheckpointSaver:
    """Saves the checkpoints of one job."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._folder: Path | None = None
        self._version = 0
        self._carried: tuple[CarriedSample, ...] = ()
        self._schedules = run.prompts.schedules
        self._lengths: Mapping[int, int] = {}
        self._waiting: set[str] = set()
        self._results: list[pb.CheckpointResult] = []
        self._start_ns = 0

    def begin(self, version: int) -> None:
        """Ask the ranks to write this version; without a folder the attempt fails.

        The process ends when another coordinator has taken the journal.
        """
        run = self._run
        run.journal.check()
        try:
            self._folder = checkpoint.prepare(self._path, version)
        except OSError as error:
            self.failed(storage_error("a checkpoint", self._path, error, checkpoint.FIELD).failure)
            return
        writers = run.state.fleet.ranks()[: run.context.spec.training.parallelism.writers]
        self._version, self._results, self._start_ns = version, [], time.time_ns()
        # A version that is saved late is the initial version of the iteration in progress.
        ledger = run.state.ledger
        cut = ledger.carry_over() if version > ledger.iteration else (*ledger.carried, *ledger.waiting)
        spec = run.context.spec
        deferred = spec.rollout.long_rounds != "Disabled" or spec.prompts.length_window > 1
        self._schedules, self._lengths = run.prompts.schedules, expected_lengths(run, version)
        self._carried = tuple(sample.without_response() for sample in cut) if deferred else cut
        self._waiting = {rank.name for rank in writers}
        run.state.checkpoint.stage = "saving"
        for name in sorted(self._waiting):
            pending = PendingCommand(CommandKind.CHECKPOINT, 0.0, f"write its part of checkpoint {version}")
            order = pb.SaveCheckpoint(folder=str(self._folder), iteration=version - 1)
            send(run, name, pb.Command(save_checkpoint=order), pending)

    def written(self, rank: str, result: pb.CheckpointResult) -> None:
        """Record that a rank has written its part; with the last one, finish the checkpoint."""
        if self._run.state.checkpoint.stage != "saving" or rank not in self._waiting:
            return
        self._waiting.discard(rank)
        self._results.append(result)
        if not self._waiting:
            self._run.state.checkpoint.stage = "finalizing"
            self._run.background.start("checkpoint", self._finish())

    def lost(self, rank: str) -> None:
        """Record that a rank is gone: if its part is missing, the attempt ends."""
        if self._run.state.checkpoint.stage == "saving" and rank in self._waiting:
            self._abandon()

    def not_written(self, rank: str, failure: pb.Failure) -> None:
        """Record that a rank could not write its part: the attempt fails. Later failures in it are ignored."""
        if self._run.state.checkpoint.stage == "saving" and rank in self._waiting:
            self.failed(failure)

    def failed(self, failure: pb.Failure) -> None:
        """Record a failed attempt: the next one is delayed, or, after MAX_TRIES, the job fails."""
        state = self._run.state.checkpoint
        self._abandon()
        state.tries += 1
        self._run.totals.checkpoint_failures += 1
        state.not_before = time.monotonic() + RETRY_SECONDS
        log.error("checkpoint failed (try %d of %d): %s", state.tries, MAX_TRIES, failure.message)
        self._run.event("checkpoint-failed", failure.message, reason=failure.reason)
        if state.tries >= MAX_TRIES:
            final = pb.Failure()
            final.CopyFrom(failure)
            final.exit_code = failure.exit_code or ExitCode.STORAGE
            final.field = failure.field or checkpoint.FIELD
            self._run.state.failure = final
        self._run.wake()

    @property
    def _path(self) -> Path:
        settings = self._run.context.spec.checkpoints
        assert settings is not None, "a checkpoint is only decided on when spec.checkpoints is set"
        return Path(settings.path)

    def _abandon(self) -> None:
        self._run.state.checkpoint.stage = "idle"
        self._waiting = set()
        if self._folder is not None:
            checkpoint.discard(self._folder)
            self._folder = None

    async def _finish(self) -> None:
        try:
            saved, retained_versions = await asyncio.to_thread(self._complete)
        except JobError as error:
            self.failed(error.failure)
            return
        except OSError as error:
            self.failed(storage_error("a checkpoint", self._path, error, checkpoint.FIELD).failure)
            return
        except Exception as error:
            log.exception("checkpoint %d could not be completed", self._version)
            message = f"a checkpoint cannot be completed at {self._path}: {type(error).__name__}: {error}"
            self.failed(pb.Failure(reason="StorageFailed", message=escaped(message)))
            return
        self._record_checkpoint(saved, retained_versions)

    def _complete(self) -> tuple[checkpoint.Checkpoint, list[int]]:
        """Complete the checkpoint, and remove older ones; return it and the newest versions that stay. Runs in a
        thread.

        Raises JobError and OSError.
        """
        run, spec = self._run, self._run.context.spec
        run.journal.check()
        assert self._folder is not None
        assert spec.checkpoints is not None
        facts = {
            "job": run.context.job.name,
            "algorithm": spec.algorithm.name,
            "seed": spec.seed,
            "promptCursor": _prompts_begun(self._schedules, self._version) * samples_per_prompt(spec),
        }
        if spec.rollout.takes_up or spec.prompts.length_window > 1:
            schedules = schedule_messages(self._schedules, spec)
            carried_file.write(self._folder, self._version, self._carried, schedules, self._lengths)
            facts[carried_file.FACT] = run.journal.job()["identity"]
        folders: dict[str, str] = {model: run.context.folder(model) for model in run.context.graph.trained}
        if run.context.draft_model:
            folders[DRAFT_MODEL] = run.context.draft_model
        sources = {
            model: checkpoint.SourceFolder(folder, spec.models.path_field(model)) for model, folder in folders.items()
        }
        saved = checkpoint.finish(self._folder, self._path, self._version, self._results, sources, facts)
        spared = _spared(self._path, run.state.evaluation)
        return saved, checkpoint.prune(self._path, self._version, spec.checkpoints.keep, spared)

    def _record_checkpoint(self, saved: checkpoint.Checkpoint, retained_versions: list[int]) -> None:
        run, state = self._run, self._run.state.checkpoint
        self._folder = None
        state.stage, state.tries = "idle", 0
        state.newest, state.folder = saved.version, str(saved.folder)
        # Segments that a remaining checkpoint needs for a replay stay, in case the newest one gets damaged. So does the
        # open one, which contains the position of the job.
        run.journal.prune(min(*retained_versions, run.state.iteration))
        run.event("checkpoint", f"checkpoint {saved.folder}", folder=str(saved.folder))
        state.made_ns = end_ns = time.time_ns()
        run.totals.checkpoint_bytes = sum(file.bytes for result in self._results for file in result.files)
        run.totals.progressed()
        run.histograms.observe(storage.CHECKPOINT_SECONDS, (end_ns - self._start_ns) / 1e9, iteration=saved.version - 1)
        run.record_span("checkpoint", self._start_ns, end_ns, saved.version - 1)
        log.info("checkpoint %s", saved.folder)
        run.wake()


def _prompts_begun(schedules: PromptSchedules, version: int) -> int:
    """Return the number of prompts begun when a version was complete."""
    return version and schedules.at(version - 1).end(version - 1)


def keep_best(run: JobRun) -> None:
    """Record the existing checkpoint with the best evaluation; a failure is only logged."""
    settings = run.context.spec.checkpoints
    if settings is None:
        return
    path = Path(settings.path)
    try:
        existing = checkpoint.versions(path)
        top = best(result for result in run.state.evaluation.results if result.version in existing)
        if top is not None:
            checkpoint.name_best(path, top.version, top.metrics["reward"])
            run.state.checkpoint.best = str(checkpoint.folder_of(path, top.version))
    except (OSError, JobError) as error:
        log.error("the best checkpoint in %s cannot be named: %s", path, error)


def _spared(path: Path, evaluation: EvaluationState) -> set[int]:
    """Return versions whose checkpoints stay regardless of age: the best by its evaluation, and the one in
    evaluation."""
    existing = checkpoint.versions(path)
    top = best([result for result in list(evaluation.results) if result.version in existing])
    spared = {top.version} if top is not None else set()
    if evaluation.ledger is not None:
        spared.add(evaluation.ledger.iteration)
    return spared
