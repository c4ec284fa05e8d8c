"""Leases of queued samples to generation workers, with samples that balancing withdrew for one of them."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.job_states import NOW, decided, ready_state

from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.job_state import JobContext, JobState, job_context

SAMPLES = 24
CAPACITY = 7
"""Samples of a worker that decodes 6 at once: one more waits there."""
WORKERS = [f"generation-{index}" for index in range(3)]


@pytest.fixture(scope="module")
def three_workers(tmp_path_factory: pytest.TempPathFactory) -> JobContext:
    generation = {"replicas": len(WORKERS), "maxBatchSize": 6}
    job = make_job(tmp_path_factory.mktemp("job"), batch=SAMPLES, generation=generation)
    return job_context(job, schedule_json(job.spec))


def leased(context: JobContext, state: JobState) -> dict[str, list[int]]:
    """Return worker -> samples that it gets now."""
    return {item.worker: list(item.samples) for item in decided(context, state, NOW) if isinstance(item, d.Generate)}


def test_samples_of_a_destination_count_as_its_load(three_workers: JobContext) -> None:
    state = ready_state(three_workers)
    state.fusion.destinations = dict.fromkeys(range(5), "generation-1")
    loads = {worker: len(samples) for worker, samples in leased(three_workers, state).items()}
    assert loads == dict.fromkeys(WORKERS, CAPACITY)


def test_a_sample_whose_destination_is_full_goes_elsewhere(three_workers: JobContext) -> None:
    state = ready_state(three_workers)
    for index in range(CAPACITY):
        state.ledger.assign(index, "generation-1")
    state.fusion.destinations = {CAPACITY: "generation-1"}
    leases = leased(three_workers, state)
    assert "generation-1" not in leases
    assert CAPACITY in [*leases["generation-0"], *leases["generation-2"]]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_worker_gets_more_than_its_capacity_and_destinations_come_first(
    three_workers: JobContext, data: st.DataObject
) -> None:
    state = ready_state(three_workers)
    decoding = data.draw(st.dictionaries(st.integers(0, SAMPLES - 1), st.sampled_from(WORKERS), max_size=12))
    before: Counter[str] = Counter()
    for index, worker in decoding.items():
        if before[worker] < CAPACITY:
            state.ledger.assign(index, worker)
            before[worker] += 1
    wanted = data.draw(st.dictionaries(st.integers(0, SAMPLES - 1), st.sampled_from(WORKERS)))
    state.fusion.destinations = wanted
    leases = leased(three_workers, state)
    free = {worker: CAPACITY - before[worker] for worker in WORKERS}
    queued = SAMPLES - before.total()
    assert all(len(samples) <= free[worker] for worker, samples in leases.items())
    assert sum(map(len, leases.values())) == min(queued, sum(free.values())), "no room stays unused"
    for worker, samples in leases.items():
        strangers = [index for index in samples if wanted.get(index, worker) != worker]
        for index in strangers:
            there = leases.get(wanted[index], [])
            assert len(there) == free[wanted[index]], "its destination was full"
            assert all(wanted.get(each) == wanted[index] for each in there), "of samples meant for it"
