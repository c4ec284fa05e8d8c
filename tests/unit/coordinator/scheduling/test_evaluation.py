"""Leases of evaluation samples: never before work of the batch, and the next weights wait for them."""

from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.job_states import NOW, decided, finish_all, kinds, ready_state

from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.evaluation_state import evaluation_tasks
from rlhf_coordinator.state.job_state import JobContext, JobState, StopOrder, job_context
from rlhf_coordinator.state.ledger import Ledger


@pytest.fixture
def context(tmp_path: Path) -> JobContext:
    job = make_job(tmp_path, batch=4, evaluation={"every": 1}, inference={"replicas": 1})
    return job_context(job, schedule_json(job.spec))


def evaluated(context: JobContext, at: int = 0, size: int = 4) -> JobState:
    """All workers are connected, and version `at` is evaluated."""
    state = ready_state(context, at)
    state.ever_ready = True
    state.evaluation.ledger = Ledger(at, size, evaluation_tasks(context.graph), 1)
    return state


def leased(context: JobContext, state: JobState) -> dict[str, tuple[int, ...]]:
    decisions = decided(context, state, NOW)
    return {
        decision.worker: decision.samples
        for decision in decisions
        if isinstance(decision, d.Generate) and decision.evaluation
    }


def test_nothing_is_evaluated_while_samples_of_the_batch_wait(context: JobContext) -> None:
    state = evaluated(context)
    assert leased(context, state) == {}
    for index in range(3):
        state.ledger.assign(index, "generation-0")
    assert leased(context, state) == {}, "one is still queued"
    state.ledger.assign(3, "generation-0")
    assert leased(context, state) == {"generation-1": (0, 1, 2, 3)}, "only who decodes nothing of the batch"


def test_all_generation_workers_evaluate_once_the_batch_is_decoded(context: JobContext) -> None:
    state = evaluated(context)
    finish_all(state)
    leases = leased(context, state)
    assert sorted(leases) == ["generation-0", "generation-1"]
    assert sorted(index for samples in leases.values() for index in samples) == [0, 1, 2, 3]


def test_a_worker_of_a_version_that_would_draw_by_the_rollout_gets_none(context: JobContext) -> None:
    state = evaluated(context)
    finish_all(state)
    state.fleet.workers["generation-0"].draws_by_request = False
    assert list(leased(context, state)) == ["generation-1"]


def test_the_next_weights_and_the_end_of_the_iteration_wait_for_it(context: JobContext) -> None:
    state = evaluated(context)
    finish_all(state)
    ledger = state.evaluation.ledger
    assert ledger is not None
    attempt = ledger.assign(0, "generation-0")
    for index in (1, 2, 3):
        ledger.assign(index, "generation-0")
    state.ledger.train()
    state.trained = True
    for rank in state.fleet.ranks():
        rank.trained_version = 1
    loading = {decision.worker for decision in decided(context, state, NOW) if isinstance(decision, d.PrepareWorker)}
    assert "generation-0" not in loading
    assert {"generation-1", "inference-0"} <= loading, "who does not evaluate goes on"
    assert attempt


def test_an_evaluation_that_nobody_can_decode_any_more_is_given_up(context: JobContext) -> None:
    state = evaluated(context)
    finish_all(state)
    state.ledger.train()
    state.trained = True
    for worker in state.fleet:
        worker.versions = dict.fromkeys(worker.versions, 1)
        worker.trained_version = 1
    assert d.GiveUpEvaluation(0) in decided(context, state, NOW)


def test_a_stopped_job_does_not_wait_for_it(context: JobContext) -> None:
    state = evaluated(context)
    state.stop = StopOrder(checkpoint=False, reason="a test")
    assert kinds(decided(context, state, NOW)) == ["Finish"]
