"""The samples that workers decode and score: those of the batch, and those of an evaluation in progress.

Owns the differences between them. Must never put a result into a ledger.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from rlhf_api.algorithms import Task
from rlhf_common import control_pb2 as pb
from rlhf_common.samples import Drawing, SampleKey
from rlhf_coordinator.fusion import incremental_scoring
from rlhf_coordinator.job import measurements
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.loop import refill_events
from rlhf_coordinator.scheduling import incremental_dispatch
from rlhf_coordinator.scheduling.waits import decode_failure, failed_sample
from rlhf_coordinator.speculation import drafting_ahead, sharing
from rlhf_coordinator.state.evaluation_state import FIRST_SAMPLE, evaluation_tasks
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import Sample
from rlhf_coordinator.storage.prompts import Prompt, random_key

MAX_FAILED_FIELD: Final = "spec.rollout.maxFailedSamples"


class SampleSet:
    """The samples of one ledger."""

    first = 0
    """Number of the first sample in messages and in the journal."""
    suffix = ""
    """Words after "samples" in the description of a command."""
    noun = "iteration"
    """The work that continues without a failed sample."""
    left_out_event = "sample-left-out"

    def __init__(self, run: JobRun, ledger: Ledger, tasks: Sequence[Task]) -> None:
        """`tasks`: the scoring tasks of a sample."""
        self.ledger = ledger
        self.tasks = tasks
        self._run = run

    def key(self, index: int, attempt: int) -> SampleKey:
        """Return the key of a sample in messages and in the journal."""
        return SampleKey(self.ledger.iteration, self.first + index, attempt)

    def index(self, key: pb.SampleKey) -> int | None:
        """Return the index of a sample of this set; None for any other sample."""
        index = key.sample - self.first
        return index if key.iteration == self.ledger.iteration and 0 <= index < len(self.ledger.samples) else None

    def random_key(self, sample: Sample) -> int:
        """Return the random key of a sample, which follows from the seed, its first iteration and its number there."""
        seed, origin = self._run.context.spec.seed, sample.origin
        return random_key(seed, origin.iteration, self.first + origin.sample)

    def decoding_leased(self, index: int) -> None:
        """Record that a sample is leased to a worker for decoding."""

    def scoring_leased(self, index: int, worker: str, tasks: tuple[str, ...]) -> None:
        """Record that a sample is leased to a worker for scoring."""

    def decoded(self, index: int, new: int) -> bool:
        """Record new tokens of a sample; return whether they may lead to a decision."""
        return False

    def scored(self, worker: str, message: pb.ScoredSample) -> None:
        """Record the result of a scoring task."""

    def left_out(self) -> None:
        """Record that a failed sample is left out."""


class BatchSamples(SampleSet):
    """The samples of the iteration in progress."""

    def __init__(self, run: JobRun) -> None:
        super().__init__(run, run.state.ledger, run.context.tasks)

    def name(self, index: int) -> str:
        """Return the name of a sample in logs and failures."""
        return f"sample {index}"

    def prompt(self, sample: Sample) -> Prompt:
        """Return the prompt of a sample."""
        return self._run.prompts.prompt(*sample.origin)

    def drawing(self, sample: Sample) -> Drawing:
        """Return the sampling method of a sample."""
        return Drawing.GREEDY if sample.greedy else Drawing.ROLLOUT

    @property
    def max_failed(self) -> float:
        """Most failed samples that an iteration may leave out."""
        return self._run.context.spec.rollout.max_failed_samples

    def failure(self, sample: Sample) -> pb.Failure:
        """Return the description of a sample's decoding failures, as a failure."""
        return pb.Failure(reason="SampleFailed", field=MAX_FAILED_FIELD, message=failed_sample(self._run.state, sample))

    def decoding_leased(self, index: int) -> None:
        self._run.state.ever_ready = True
        incremental_scoring.decoding_started(self._run, index)

    def scoring_leased(self, index: int, worker: str, tasks: tuple[str, ...]) -> None:
        incremental_scoring.scoring_assigned(self._run, index, worker, tasks)

    def decoded(self, index: int, new: int) -> bool:
        """Count the new tokens; return whether they complete a block to score early, or may decide a cut by counts."""
        run, length = self._run, len(self.ledger.samples[index].response)
        run.totals.tokens += new
        awaited = run.scheduled.awaited_tokens
        if awaited is not None and length - new <= awaited <= length:
            return True
        early = new > 0 and incremental_dispatch.is_enabled(run.context, run.state)
        return early and incremental_dispatch.gained_block(run.state, index, length - new)

    def finished(self, index: int, worker: str, message: pb.FinishedSample, new: int) -> None:
        """Record that a response is complete, with `new` new tokens."""
        run = self._run
        incremental_scoring.response_finished(run, index)
        sharing.response_finished(run, index, worker)
        drafting_ahead.response_finished(run, index)
        run.totals.tokens += max(0, new)
        measurements.response_finished(run, worker, message, len(self.ledger.samples[index].response))

    def scored(self, worker: str, message: pb.ScoredSample) -> None:
        incremental_scoring.score_taken(self._run, message)
        measurements.score_taken(self._run, worker, message)
        refill_events.follow(self._run)

    def left_out(self) -> None:
        refill_events.follow(self._run)
        self._run.totals.failed += 1


class EvaluationSamples(SampleSet):
    """The samples of the evaluation in progress."""

    first = FIRST_SAMPLE
    suffix = " of an evaluation"
    noun = "evaluation"
    left_out_event = "evaluation-sample-left-out"
    max_failed = math.inf

    def __init__(self, run: JobRun, ledger: Ledger) -> None:
        super().__init__(run, ledger, evaluation_tasks(run.context.graph))
        assert run.context.spec.evaluation is not None
        self._settings = run.context.spec.evaluation

    def name(self, index: int) -> str:
        """Return the name of a sample in logs and failures."""
        return f"response {index} of the evaluation of weight version {self.ledger.iteration}"

    def prompt(self, sample: Sample) -> Prompt:
        """Return the prompt of a sample."""
        return self._run.evaluation_prompts[sample.index // self._settings.samples_per_prompt]

    def drawing(self, sample: Sample) -> Drawing:
        """Return the sampling method of a sample."""
        return Drawing.EVALUATION if self._settings.temperature else Drawing.GREEDY

    def failure(self, sample: Sample) -> pb.Failure:
        """Return the description of a sample's decoding failures, as a failure."""
        return pb.Failure(message=decode_failure(self.name(sample.index), sample))

    def finished(self, index: int, worker: str, message: pb.FinishedSample, new: int) -> None:
        """Record that a response is complete."""
        self._run.totals.evaluated += 1


Samples = BatchSamples | EvaluationSamples


def evaluation_samples(run: JobRun) -> EvaluationSamples | None:
    """Return the samples of the evaluation in progress; None without one."""
    ledger = run.state.evaluation.ledger
    return None if ledger is None else EvaluationSamples(run, ledger)


def sample_sets(run: JobRun) -> Iterator[Samples]:
    """Yield all sets of samples that workers may have."""
    yield BatchSamples(run)
    if (evaluated := evaluation_samples(run)) is not None:
        yield evaluated


def find(run: JobRun, key: pb.SampleKey) -> tuple[Samples, int] | None:
    """Return the set and the index of a sample; None when no present set has it."""
    samples = BatchSamples(run) if key.sample < FIRST_SAMPLE else evaluation_samples(run)
    index = None if samples is None else samples.index(key)
    return None if samples is None or index is None else (samples, index)
