"""Poison samples: scheduler and ledger find them in few attempts, and never fail another sample."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.job_states import NOW, decided, ready_state

from rlhf_common.samples import VersionSpan
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.decode_failures import CLEARED_TOKENS
from rlhf_coordinator.state.job_state import JobContext, JobState, job_context
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse

SIZE = 8
RETRIES = 2
LENGTH = 3 * CLEARED_TOKENS
STEP = 16
"""Tokens that a worker decodes of each sample between two reports."""
WORKERS = ("generation-0", "generation-1")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> JobContext:
    job = make_job(tmp_path_factory.mktemp("job"), batch=SIZE)
    return job_context(job, schedule_json(job.spec))


def response(tokens: int) -> PackedResponse:
    return PackedResponse(b"\1\0\0\0" * tokens, b"\0" * 4 * tokens, (VersionSpan(0, tokens),) if tokens else ())


def lease(context: JobContext, state: JobState) -> None:
    for decision in decided(context, state, NOW):
        if isinstance(decision, d.Generate):
            for index in decision.samples:
                state.ledger.assign(index, decision.worker)


def end(state: JobState, worker: str) -> None:
    """End a worker with a failure; its next process starts immediately."""
    state.ledger.record_failure(worker, "illegal memory access", RETRIES)
    state.ledger.reclaim(worker)


def decode(ledger: Ledger, worker: str) -> None:
    for index in list(ledger.held_by(worker)):
        lease = ledger.samples[index].decoding
        assert lease is not None
        tokens = len(ledger.samples[index].response) + STEP
        if tokens >= LENGTH:
            assert ledger.finish(index, lease.attempt, worker, response(LENGTH), "length", "")
        else:
            ledger.progress(index, lease.attempt, worker, tokens - STEP, response(STEP))


def poisoned(ledger: Ledger, worker: str, poison: Mapping[int, int]) -> bool:
    """Return whether this worker reaches the position of a sample at which it fails."""
    return any(
        index in poison and poison[index] < len(ledger.samples[index].response) + STEP
        for index in ledger.held_by(worker)
    )


@settings(max_examples=25, deadline=None)
@given(
    poison=st.dictionaries(st.integers(0, SIZE - 1), st.integers(0, LENGTH - 1), max_size=2),
    accidents=st.dictionaries(st.integers(0, 60), st.sampled_from(WORKERS), max_size=3),
)
def test_the_samples_that_end_their_workers_fail_and_all_others_finish(
    context: JobContext, poison: dict[int, int], accidents: dict[int, str]
) -> None:
    state = ready_state(context)
    ledger, ends = state.ledger, 0
    for moment in range(400):
        lease(context, state)
        for worker in WORKERS:
            if poisoned(ledger, worker, poison):
                ends += 1
                end(state, worker)
            elif accidents.get(moment) == worker and len(ledger.held_by(worker)) > 1:
                end(state, worker)
            else:
                decode(ledger, worker)
        for index in list(ledger.faulted):
            sample = ledger.samples[index]
            if sample.state == "queued" and sample.faults.is_final(RETRIES):
                ledger.give_up(index)
        if ledger.all_generated:
            break
    assert {sample.index for sample in ledger.samples if sample.failed} == set(poison)
    assert ledger.all_generated
    assert ends <= (RETRIES + 1) * len(poison), "each try ended one worker"


def test_what_a_worker_failed_on_goes_elsewhere_with_its_tokens(context: JobContext) -> None:
    state = ready_state(context)
    ledger = state.ledger
    lease(context, state)
    decode(ledger, WORKERS[0])
    decoding = ledger.samples[0].decoding
    assert decoding is not None
    assert decoding.worker == WORKERS[0]
    assert ledger.failed_on(0, decoding.attempt, WORKERS[0], response(STEP + 1), "it cannot be decoded", RETRIES)
    (again,) = [item for item in decided(context, state, NOW) if isinstance(item, d.Generate)]
    assert (again.worker, again.samples) == (WORKERS[1], (0,))
    assert len(ledger.samples[0].response) == STEP + 1


def test_a_suspect_is_decoded_alone_until_it_is_past_the_place_of_the_fault(context: JobContext) -> None:
    state = ready_state(context)
    ledger = state.ledger
    for _ in range(RETRIES):
        lease(context, state)
        for worker in WORKERS:
            end(state, worker)
    assert len(ledger.isolated()) == SIZE
    lease(context, state)
    assert [len(ledger.held_by(worker)) for worker in WORKERS] == [1, 1]
    for _ in range(CLEARED_TOKENS // STEP):
        assert not [item for item in decided(context, state, NOW) if isinstance(item, d.Generate)]
        decode(ledger, WORKERS[0])
    lease(context, state)
    assert [len(ledger.held_by(worker)) for worker in WORKERS] == [1, 1], "the next one waits until it can be alone"
    cleared = ledger.samples[next(iter(ledger.held_by(WORKERS[0])))]
    assert (cleared.isolated, cleared.faults.count) == (False, 0)


def test_without_faults_leases_are_what_they_were(context: JobContext) -> None:
    state = ready_state(context)
    assert [item for item in decided(context, state, NOW) if isinstance(item, d.Generate)] == [
        d.Generate("generation-0", (0, 2, 4, 6)),
        d.Generate("generation-1", (1, 3, 5, 7)),
    ]
