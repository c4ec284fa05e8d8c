"""The scheduler's output is deterministic, leaves the state unchanged, and has the values for status and metrics."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process
from tests.support.coordinator.job_states import NOW, pend, ready_state

from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_common.samples import VersionSpan
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling import iteration
from rlhf_coordinator.service.prometheus import JobCollector
from rlhf_coordinator.service.status import job_status
from rlhf_coordinator.state.job_state import JobState, StopOrder
from rlhf_coordinator.state.sample import PackedResponse
from rlhf_coordinator.state.worker import CommandKind
from rlhf_planner.inter_stage.choose import FusionChoice

AT = 2
"""Iteration of all states in this module."""
FIXED = {"mode": "Fixed", "threshold": 4, "pool": 1}
JOBS: dict[str, dict[str, Any]] = {
    "fixed": {"fusion": {"interStage": FIXED}},
    "auto": {"fusion": {"interStage": {"mode": "Auto"}}},
    "alone": {"fusion": {"interStage": FIXED}, "inference": {"replicas": 0}},
    "without fusion": {"fusion": {"interStage": {"mode": "Disabled"}}, "inference": {"replicas": 0}},
    "colocated": {"fusion": {"interStage": FIXED}, "inference": {"replicas": 0}, "placement": "Colocated"},
}
STANDINGS = ("current", "current", "current", "stale", "fresh", "lost", "busy", "reads", "failed", "drains", "ahead")
SAMPLES = ("queued", "decoding", "decoding", "migrating", "generated", "scored")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobRun]:
    """Jobs of each kind, started in this process; the tests replace their state."""
    begun = {}
    for name, spec in JOBS.items():
        folder: Path = tmp_path_factory.mktemp("job")
        fields = {"generation": {"replicas": 3, "maxBatchSize": 6}, **spec}
        fields["fusion"] = {"intraStage": {"mode": "Disabled"}, **fields["fusion"]}
        begun[name] = begin_in_process(folder, make_job(folder, batch=8, **fields))[0]
    return begun


def place_samples(state: JobState, data: st.DataObject) -> None:
    """Put every sample into some state, on some worker."""
    names = [worker.name for worker in state.fleet.in_group(Group.GENERATION)]
    last = data.draw(st.sampled_from(["any", "generated", "scored"]))
    for sample in state.ledger.samples:
        to = data.draw(st.sampled_from(SAMPLES)) if last == "any" else last
        if to == "queued":
            continue
        name = data.draw(st.sampled_from(names))
        attempt, tokens = state.ledger.assign(sample.index, name), data.draw(st.integers(1, 40))
        response = PackedResponse(b"\1\0\0\0" * tokens, b"\0\0\0\0" * tokens, (VersionSpan(AT, tokens),))
        state.ledger.progress(sample.index, attempt, name, 0, response)
        if to == "migrating":
            state.ledger.migrate(sample.index, data.draw(st.sampled_from([other for other in names if other != name])))
        elif to in ("generated", "scored"):
            state.ledger.finish(sample.index, attempt, name, response, "stop", "")
        for task in sorted(sample.open_tasks) if to == "scored" else ():
            attempt = state.ledger.assign_scores(sample.index, [task], "w")
            state.ledger.score(sample.index, attempt, "w", task, b"\0" * 4)


def place_worker(state: JobState, name: str, standing: str) -> None:
    """Put a worker into some condition."""
    worker = state.fleet.workers[name]
    worker.roles = frozenset({worker.group} | ({Group.INFERENCE} if worker.group is Group.GENERATION else set()))
    if worker.rank is not None and worker.group is Group.GENERATION:
        worker.roles |= {Group.TRAINING}
    worker.versions = {"actor": AT, "critic": AT}
    worker.trained_version = AT + state.trained
    if standing == "stale":
        worker.versions = {"actor": AT, "critic": 0}
    elif standing == "fresh":
        worker.roles, worker.versions, worker.trained_version = frozenset(), {}, 0
    elif standing == "lost":
        state.ledger.reclaim(name)
        state.fleet.closed(name, worker.session, NOW - 10)
        state.fleet.expire(NOW)
    elif standing in ("busy", "reads"):
        pend(state, name, CommandKind.LOAD, from_ranks=standing == "reads")
    elif standing == "failed":
        worker.train_failure, worker.failed_at = pb.Failure(message="it broke", retryable=True), NOW
    elif standing == "drains":
        worker.draining_since = NOW - 60
    elif standing == "ahead":
        worker.trained_version = AT + 1


def drawn_state(run: JobRun, data: st.DataObject) -> JobState:
    """Generate a state of a job in its iteration `AT`."""
    state = ready_state(run.context, at=AT)
    place_samples(state, data)
    if state.ledger.all_scored and data.draw(st.booleans()):
        state.ledger.train()
        state.trained = True
    for worker in list(state.fleet):
        place_worker(state, worker.name, data.draw(st.sampled_from(STANDINGS)))
    state.ever_ready = data.draw(st.booleans())
    state.fusion.measured = data.draw(st.booleans())
    state.schedule.stage = data.draw(st.sampled_from(["stages", "tables", "decided", "decided"]))
    state.checkpoint.newest = data.draw(st.sampled_from([0, AT, AT + 1]))
    threshold, pool = data.draw(st.sampled_from([(0, 0), (4, 1), (6, 2), (8, 3)]))
    state.fusion.choice = FusionChoice(threshold, pool, "KV", 1.0, 2.0, (), "drawn")
    state.stop = data.draw(st.sampled_from([None, None, None, StopOrder(checkpoint=True, reason="asked")]))
    state.failure = data.draw(st.sampled_from([None, None, None, pb.Failure(message="it broke")]))
    return state


def fingerprint(state: JobState) -> tuple[object, ...]:
    """Return a value that differs if samples, workers, or the job's state differ."""
    standing = (state.trained, state.checkpoint, state.schedule, state.stop, state.failure, state.fusion.choice)
    return pickle.dumps(state.ledger), [repr(worker) for worker in state.fleet], repr(standing)


def reported(run: JobRun) -> dict[str, set[str]]:
    """Return the labels of the phase, the pool and released workers that the metrics show as 1."""
    registry = CollectorRegistry()
    registry.register(JobCollector(run))
    labels = {"rlhf_phase": "phase", "rlhf_fusion_pool": "worker", "rlhf_fusion_released": "worker"}
    shown: dict[str, set[str]] = {name: set() for name in labels}
    for family in registry.collect():
        for series in family.samples:
            if series.name in labels and series.value:
                shown[series.name].add(series.labels[labels[series.name]])
    return shown


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(job=st.sampled_from(sorted(JOBS)), data=st.data())
def test_one_state_gives_one_value_and_status_and_metrics_report_it(
    runs: dict[str, JobRun], job: str, data: st.DataObject
) -> None:
    run = runs[job]
    state = run.state = drawn_state(run, data)
    before = fingerprint(state)
    now = NOW + data.draw(st.sampled_from([0.0, 1.0, 10.0]))
    value = run.scheduled = iteration.decide(run.context, state, now)
    assert iteration.decide(run.context, state, now) == value
    assert fingerprint(state) == before, "deciding changes nothing"

    tail, status, shown = value.consolidation, job_status(run), reported(run)
    assert (status.phase, shown["rlhf_phase"]) == (value.phase, {value.phase})
    assert (tuple(status.pool), shown["rlhf_fusion_pool"]) == (tail.pool, set(tail.pool))
    assert shown["rlhf_fusion_released"] == set(tail.released)
    assert status.HasField("fusion") == tail.possible
    if tail.possible:
        assert tuple(status.fusion.released) == tail.released
        assert (status.fusion.threshold > 0) == tail.planned
    assert not set(tail.pool) & {move.source for move in tail.moves}, "what is in the pool stays there"
