"""Messages about evaluation samples pass the same checks as those about the batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_coordinator.evaluation import rounds
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.loop.event_handlers import EventHandlers
from rlhf_coordinator.state.evaluation_state import FIRST_SAMPLE
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.storage.journal_pb2 import Begun
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver

WORKER = "generation-0"


@contextmanager
def evaluated_run(folder: Path, **spec: Any) -> Iterator[JobRun]:
    """Return a job that decodes a sample of the batch and one of an evaluation on one worker."""
    job = make_job(folder, batch=4, algorithm="grpo", evaluation={"every": 1, "promptCount": 2}, **spec)
    run, _ = begin_in_process(folder, job)
    run.journal.begin(Begun(iteration=0, coordinator_epoch=1))
    run.evaluation_prompts = run.prompts.first(2)
    rounds.begin(run, 0)
    yield run
    run.journal.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[JobRun]:
    with evaluated_run(tmp_path) as run:
        yield run


def finished(key: pb.SampleKey, **changes: object) -> pb.WorkerMessage:
    message = pb.FinishedSample(
        key=key,
        tokens=pack(np.array([7, 8], dtype=np.int32)),
        log_probabilities=pack(np.zeros(2, dtype=np.float32)),
        versions=[pb.VersionSpan(version=0, tokens=2)],
        finish_reason="stop",
        text="answer",
    )
    message.MergeFrom(pb.FinishedSample(**changes))  # type: ignore[arg-type]
    return pb.WorkerMessage(finished=message)


def keys(run: JobRun) -> tuple[pb.SampleKey, pb.SampleKey]:
    """Return the leases of the first sample of the batch and of the evaluation."""
    ledger = run.state.evaluation.ledger
    assert ledger is not None
    batch = pb.SampleKey(iteration=0, sample=0, attempt=run.state.ledger.assign(0, WORKER))
    return batch, pb.SampleKey(iteration=0, sample=FIRST_SAMPLE, attempt=ledger.assign(0, WORKER))


def test_an_unknown_finish_reason_is_refused_for_both_and_journaled_for_neither(run: JobRun) -> None:
    handlers = EventHandlers(run, CheckpointSaver(run))
    for key in keys(run):
        with pytest.raises(ValueError, match="finished by 'tired', not by stop or length"):
            handlers.message(WORKER, finished(key, finish_reason="tired"))
    assert list(run.journal.read(0)) == [record for record in run.journal.read(0) if record.HasField("begun")]
    ledger = run.state.evaluation.ledger
    assert ledger is not None
    handlers.message(WORKER, finished(pb.SampleKey(iteration=0, sample=FIRST_SAMPLE, attempt=1)))
    assert run.totals.stale == 1
    assert ledger.samples[0].state is not SampleState.GENERATED, "of an old lease"


def test_a_reward_that_may_abstain_does_so_in_both_and_the_job_goes_on(tmp_path: Path) -> None:
    reward = {"function": {"module": "rewards"}, "retries": 0, "onFailure": "Abstain"}
    models = {"actor": {"path": str(tmp_path / "policy")}, "reward": reward}
    with evaluated_run(tmp_path, models=models) as run:
        handlers = EventHandlers(run, CheckpointSaver(run))
        task = next(task.name for task in run.context.tasks if task.rewards)
        evaluation = run.state.evaluation.ledger
        assert evaluation is not None
        for key in keys(run):
            handlers.message(WORKER, finished(key))
        for ledger, number in ((run.state.ledger, 0), (evaluation, FIRST_SAMPLE)):
            key = pb.SampleKey(iteration=0, sample=number, attempt=ledger.assign_scores(0, [task], WORKER))
            failure = pb.Failure(reason="UserCode", message="a test")
            handlers.message(WORKER, pb.WorkerMessage(scored=pb.ScoredSample(key=key, task=task, failure=failure)))
            assert ledger.samples[0].abstained
        late = pb.WorkerMessage(scored=pb.ScoredSample(key=key, task=task, failure=failure))
        handlers.message(WORKER, late)
        assert (run.totals.score_failures[task], run.totals.stale) == (2, 1), "a late failure is no abstention"
        assert run.state.failure is None
        assert [record.scored.abstained for record in run.journal.read(0) if record.HasField("scored")] == [True, True]


@pytest.mark.parametrize(
    "changes",
    [
        {"result": pack(np.array([1.0, 2.0], np.float32))},
        {"result": pack(np.array([np.nan], np.float32))},
        {"result": pack(np.ones(1, np.float32)), "metrics": {"Not A Name": 1.0}},
    ],
)
def test_a_score_is_checked_alike(run: JobRun, changes: dict[str, object]) -> None:
    handlers = EventHandlers(run, CheckpointSaver(run))
    task = next(task.name for task in run.context.tasks if task.rewards)
    evaluation = run.state.evaluation.ledger
    assert evaluation is not None
    for key in keys(run):
        handlers.message(WORKER, finished(key))
    for ledger, number in ((run.state.ledger, 0), (evaluation, FIRST_SAMPLE)):
        attempt = ledger.assign_scores(0, [task], WORKER)
        key = pb.SampleKey(iteration=0, sample=number, attempt=attempt)
        handlers.message(WORKER, pb.WorkerMessage(scored=pb.ScoredSample(key=key, task=task, **changes)))  # type: ignore[arg-type]
        assert ledger.samples[0].failures[task] == 1
    assert not [record for record in run.journal.read(0) if record.HasField("scored")]
    unknown = pb.ScoredSample(key=pb.SampleKey(iteration=0, sample=FIRST_SAMPLE, attempt=1), task="nothing")
    with pytest.raises(ValueError, match="a score of task 'nothing'; this job has"):
        handlers.message(WORKER, pb.WorkerMessage(scored=unknown))
