"""Leases of drafts for the next iteration: to idle workers alone, ended before anything else reaches the worker."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.job_states import NOW, decided, finish_all, pend, ready_state

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import Lease, VersionSpan
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state import ahead_state
from rlhf_coordinator.state.ahead_state import MEASURED_TOKENS, AheadDraft
from rlhf_coordinator.state.evaluation_state import evaluation_tasks
from rlhf_coordinator.state.job_state import JobContext, JobState, StopOrder, job_context
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse, SampleState
from rlhf_coordinator.state.worker import CommandKind

BATCH, SLOTS = 4, 6
WORKERS = ("generation-0", "generation-1")


def context_of(folder: Path, ahead: str = "Auto", **spec: Any) -> JobContext:
    generation = {"replicas": 2, "maxBatchSize": SLOTS, "speculation": {"ahead": ahead}}
    job = make_job(folder, batch=BATCH, inference={"replicas": 1}, generation=generation, **spec)
    return job_context(job, schedule_json(job.spec))


@pytest.fixture
def context(tmp_path: Path) -> JobContext:
    return context_of(tmp_path)


def state_of(context: JobContext, at: int = 0) -> JobState:
    """All workers are connected and can draft ahead."""
    state = ready_state(context, at)
    state.ever_ready = True
    state.ahead.begin_iteration(at)
    for name in WORKERS:
        state.fleet.beat(name, pb.Heartbeat(decodes_ahead=True), NOW)
    return state


def leased(context: JobContext, state: JobState, now: float = NOW) -> dict[str, tuple[int, ...]]:
    decisions = decided(context, state, now)
    return {decision.worker: decision.samples for decision in decisions if isinstance(decision, d.DraftAhead)}


def ended(context: JobContext, state: JobState) -> set[str]:
    return {decision.worker for decision in decided(context, state, NOW) if isinstance(decision, d.EndDrafts)}


def take(state: JobState, leases: dict[str, tuple[int, ...]]) -> None:
    """Record leases as the loop does."""
    for worker, samples in leases.items():
        state.ahead.since.setdefault(worker, NOW)
        for index in samples:
            state.ahead.upcoming.begin(index, Lease(worker, 1))


def test_workers_draft_once_nothing_of_the_batch_is_left_for_them(context: JobContext) -> None:
    state = state_of(context)
    assert leased(context, state) == {}, "samples wait"
    for index in range(BATCH):
        state.ledger.assign(index, WORKERS[0])
    assert leased(context, state) == {WORKERS[1]: (0, 1, 2)}, "half of its slots"
    take(state, {WORKERS[1]: (0, 1, 2)})
    assert leased(context, state) == {}
    finish_all(state)
    assert ended(context, state) == set()


def test_everybody_drafts_while_ranks_train(context: JobContext) -> None:
    state = state_of(context)
    finish_all(state)
    leases = leased(context, state)
    assert sorted(leases) == sorted(WORKERS)
    assert sorted(index for samples in leases.values() for index in samples) == list(range(BATCH)), "each once"
    take(state, leases)
    assert leased(context, state) == {}
    assert ended(context, state) == set()


@pytest.mark.parametrize("ahead", ["Disabled", "Auto"])
def test_nothing_is_drafted_where_it_is_disabled_or_cannot_be_used(tmp_path: Path, ahead: str) -> None:
    context = context_of(tmp_path, ahead, iterations=2)
    for at, stop in ((0, StopOrder(checkpoint=False, reason="")), (1, None)) if ahead == "Auto" else ((0, None),):
        state = state_of(context, at)
        finish_all(state)
        state.stop = stop
        assert leased(context, state) == {}, "the last iteration has no next one, and a stopping job neither"


def test_an_engine_that_cannot_gets_none(context: JobContext) -> None:
    state = state_of(context)
    finish_all(state)
    state.fleet.beat(WORKERS[0], pb.Heartbeat(learns_siblings=True), NOW)
    assert list(leased(context, state)) == [WORKERS[1]]


def test_an_evaluation_comes_first(context: JobContext) -> None:
    state = state_of(context)
    finish_all(state)
    take(state, leased(context, state))
    state.evaluation.ledger = Ledger(0, 2, evaluation_tasks(context.graph), 1)
    assert ended(context, state) == set(WORKERS)
    assert leased(context, state) == {}


def test_drafts_end_before_new_weights(context: JobContext) -> None:
    state = state_of(context)
    finish_all(state)
    take(state, leased(context, state))
    state.ledger.train()
    state.trained = True
    for rank in state.fleet.ranks():
        rank.trained_version = 1
    decisions = decided(context, state, NOW)
    loads = [decision for decision in decisions if isinstance(decision, d.PrepareWorker)]
    assert {decision.worker for decision in loads} >= set(WORKERS)
    first_load = decisions.index(loads[0])
    assert {decision.worker for decision in decisions[:first_load] if isinstance(decision, d.EndDrafts)} == set(WORKERS)
    assert not any(isinstance(decision, d.DraftAhead) for decision in decisions)


def test_drafts_end_when_their_worker_is_gone_or_busy(context: JobContext) -> None:
    state = state_of(context)
    finish_all(state)
    take(state, leased(context, state))
    state.fleet.workers[WORKERS[0]].session = 0
    pend(state, WORKERS[1], CommandKind.LOAD)
    assert ended(context, state) == set(WORKERS)


def test_a_worker_rests_after_an_end(context: JobContext) -> None:
    state = state_of(context)
    finish_all(state)
    state.ahead.not_before = {WORKERS[0]: NOW + 1}
    assert list(leased(context, state)) == [WORKERS[1]]
    assert sorted(leased(context, state, NOW + 1)) == sorted(WORKERS)


def test_the_tokens_of_all_drafts_are_bounded(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(context)
    finish_all(state)
    whole = PackedResponse(b"\1\0\0\0" * 9, b"\0\0\0\0" * 9, (VersionSpan(0, 9),))
    state.ahead.upcoming.begin(0, Lease(WORKERS[0], 1))
    state.ahead.upcoming.take(0, whole)
    state.ahead.upcoming.end(0, complete=True)
    monkeypatch.setattr("rlhf_coordinator.scheduling.drafting_ahead.MAX_TOKENS", 9)
    assert leased(context, state) == {}
    monkeypatch.setattr("rlhf_coordinator.scheduling.drafting_ahead.MAX_TOKENS", 10)
    assert sorted(index for samples in leased(context, state).values() for index in samples) == [1, 2, 3]


def test_drafts_that_are_wrong_too_often_stop_until_the_counts_have_faded(context: JobContext) -> None:
    state = state_of(context)
    finish_all(state)
    state.ahead.compared[1] = 4 * MEASURED_TOKENS
    assert not state.ahead.pays
    assert leased(context, state) == {}
    pays = []
    for iteration in range(1, 5):
        state.ahead.begin_iteration(iteration)
        pays.append(state.ahead.pays)
    assert pays == [False, False, False, True]
    state.ahead.compared[1], state.ahead.right[1] = 4 * MEASURED_TOKENS, MEASURED_TOKENS
    assert state.ahead.pays


def test_a_response_is_compared_up_to_its_first_difference_by_age(context: JobContext) -> None:
    state = state_of(context)
    tokens = b"".join(number.to_bytes(4, "little") for number in (1, 2, 3, 4, 5))
    drafted = PackedResponse(tokens, b"\0" * 20, (VersionSpan(0, 2), VersionSpan(1, 3)))
    state.ahead.upcoming.drafts[2] = AheadDraft(1, response=drafted)
    state.ahead.begin_iteration(1)
    drawn = b"".join(number.to_bytes(4, "little") for number in (1, 2, 3, 9))
    assert state.ahead.finished(2, drawn, 1) == (4, 3)
    assert state.ahead.finished(3, drawn, 1) == (0, 0)
    assert (dict(state.ahead.compared), dict(state.ahead.right)) == ({1: 2, 0: 2}, {1: 2, 0: 1})
    assert state.ahead.parted == 1
    state.ahead.begin_iteration(2)
    assert not state.ahead.current.drafts


events = st.lists(
    st.tuples(
        st.sampled_from(["assign", "finish", "score", "requeue", "train", "busy", "idle", "lose", "evaluate", "rest"]),
        st.integers(0, BATCH - 1),
        st.sampled_from(WORKERS),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(events)
def test_a_worker_that_gets_anything_else_has_no_draft_after_the_decisions(story: list[tuple[str, int, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = context_of(Path(folder))
        state = state_of(context)
        for event, index, worker in story:
            change(context, state, event, index, worker)
            carry_out_and_check(context, state)


def change(context: JobContext, state: JobState, event: str, index: int, worker: str) -> None:
    """Apply an event, if possible."""
    ledger, place = state.ledger, state.fleet.workers[worker]
    sample = ledger.samples[index]
    if event == "assign" and sample.state is SampleState.QUEUED:
        ledger.assign(index, worker)
    elif event == "finish" and sample.decoding is not None:
        response = PackedResponse(b"\1\0\0\0", b"\0\0\0\0", (VersionSpan(0, 1),))
        ledger.finish(index, sample.decoding.attempt, sample.decoding.worker, response, "stop", "")
    elif event == "score" and sample.open_tasks:
        ledger.assign_scores(index, sorted(sample.open_tasks), worker)
    elif event == "requeue":
        ledger.reclaim(worker)
    elif event == "train" and ledger.all_scored and not state.trained:
        ledger.train()
        state.trained = True
    elif event == "busy":
        pend(state, worker, CommandKind.LOAD)
    elif event == "idle":
        place.pending.clear()
    elif event == "lose":
        place.session = 0
    elif event == "evaluate" and state.evaluation.ledger is None:
        state.evaluation.ledger = Ledger(0, 2, evaluation_tasks(context.graph), 1)


def carry_out_and_check(context: JobContext, state: JobState) -> None:
    """Carry out decisions about drafts, and check who has some and what comes in which order."""
    decisions = decided(context, state, NOW)
    addressed: set[str] = set()
    for decision in decisions:
        worker = getattr(decision, "worker", "")
        if isinstance(decision, d.EndDrafts):
            assert worker not in addressed, "an end comes first"
            for index in state.ahead.upcoming.on(worker):
                state.ahead.upcoming.end(index, complete=False)
            del state.ahead.since[worker]
        elif isinstance(decision, d.DraftAhead):
            assert worker not in addressed, "who gets work drafts nothing"
            for index in decision.samples:
                earlier = state.ahead.upcoming.drafts.get(index)
                assert earlier is None or (earlier.lease is None and not earlier.complete)
            take(state, {worker: decision.samples})
        else:
            addressed.add(worker)
            assert not state.ahead.upcoming.on(worker)
    for name in WORKERS:
        drafts = state.ahead.upcoming.on(name)
        assert len(drafts) <= SLOTS // 2
        busy = state.ledger.decoding_on(name) or not state.fleet.workers[name].idle
        assert not (drafts and busy)
    assert state.ahead.upcoming.tokens <= ahead_state.MAX_TOKENS
