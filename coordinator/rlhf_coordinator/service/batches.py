"""Batches that training ranks fetch: the current iteration's from the ledger, an earlier one's from the journal."""

from rlhf_api.algorithms import has_greedy_baseline, samples_begun, samples_of_batch, samples_per_prompt
from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.state.gradient_chunks import groups_per_chunk
from rlhf_coordinator.storage.batch import batch_parts, chunk_parts, replayed

KEPT = 2
"""Most batches in memory."""


class Batches:
    """The batches of one job."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._parts: dict[int, list[pb.BatchPart]] = {}

    def parts(self, iteration: int) -> list[pb.BatchPart]:
        """Return all parts of a batch.

        Raises LookupError when the batch has not begun, is not scored, or has no segment any more, JobError when its
        segment is incomplete.
        """
        run = self._run
        if iteration not in self._parts:
            if not 0 <= iteration <= run.state.iteration:
                raise LookupError(f"iteration {iteration} has not begun; the job is in {run.state.iteration}")
            ledger = run.state.ledger
            if iteration < run.state.iteration and iteration not in run.journal.iterations():
                raise LookupError(f"iteration {iteration} is not kept any more; the job is in {run.state.iteration}")
            if iteration < run.state.iteration:
                records = run.journal.read(iteration)
                spec = run.context.spec
                per_prompt = samples_per_prompt(spec)
                size = samples_begun(spec, run.prompts.schedules, iteration)
                spare, greedy = size - samples_of_batch(spec), has_greedy_baseline(spec)
                ledger = replayed(iteration, size, run.context.tasks, records, run.prompts, per_prompt, spare, greedy)
            elif not ledger.all_scored:
                raise LookupError(f"iteration {iteration} is not scored yet: {ledger.counts()}")
            while len(self._parts) >= KEPT:
                del self._parts[next(iter(self._parts))]
            self._parts[iteration] = list(batch_parts(ledger, run.prompts, groups_per_chunk(run.context.spec)))
        return self._parts[iteration]

    def chunk(self, iteration: int, chunk: int) -> list[pb.BatchPart]:
        """Return all parts of one chunk of the iteration in progress.

        Raises LookupError for another iteration, and for a chunk that is not journaled.
        """
        run = self._run
        if iteration != run.state.iteration:
            raise LookupError(
                f"chunk {chunk} of iteration {iteration} is asked for; the job is in {run.state.iteration}"
            )
        try:
            return list(chunk_parts(run.state.ledger, run.prompts, groups_per_chunk(run.context.spec), chunk))
        except ValueError as error:
            raise LookupError(str(error)) from error
