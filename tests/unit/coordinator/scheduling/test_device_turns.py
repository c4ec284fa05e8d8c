"""A generation worker with a training rank is asked to decode and score, or to train, but never both."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.job_states import NOW, decided, finish_all, kinds, pend, ready_state

from rlhf_common import control_pb2 as pb
from rlhf_common.worker_roles import WIRE
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling import iteration, waits
from rlhf_coordinator.scheduling.derived_state import derive
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.job_state import JobContext, JobState, job_context
from rlhf_coordinator.state.worker import CommandKind, Worker

EVERY = frozenset({"generation", "inference", "training"})
TRAINING = (d.FormGroup, d.Train, d.MeasureSchedule)
SERVING = (d.Generate, d.Score, d.PrepareWorker, d.MeasureCosts, d.Migrate)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> JobContext:
    generation = {"replicas": 3, "maxBatchSize": 6}
    job = make_job(
        tmp_path_factory.mktemp("job"), batch=8, placement="Colocated", inference={"replicas": 0}, generation=generation
    )
    return job_context(job, schedule_json(job.spec))


def colocated_state(context: JobContext, at: int = 1) -> JobState:
    """Three generation workers with all models; the first two have the ranks."""
    state = ready_state(context, at=at)
    for worker in state.fleet:
        worker.versions = {"actor": at, "critic": at}
        worker.roles = EVERY if worker.rank is not None else frozenset({"generation", "inference"})
    return state


def fresh(state: JobState) -> None:
    for worker in state.fleet:
        worker.roles, worker.versions, worker.trained_version = frozenset(), {}, 0


def asked(decisions: list[d.Decision], *of: type) -> set[str]:
    return {str(getattr(item, "worker", "")) for item in decisions if isinstance(item, of)}


def test_there_is_no_training_group_of_its_own(context: JobContext) -> None:
    state = colocated_state(context)
    assert [worker.name for worker in state.fleet] == ["generation-0", "generation-1", "generation-2"]
    assert [rank.name for rank in state.fleet.ranks()] == ["generation-0", "generation-1"]
    assert derive(context, state, NOW).group.version == 1
    with pytest.raises(ValueError, match="generation = 1: must be 2 to 4096, the first of which hold the training"):
        state.fleet.resize({"generation": 1}, NOW)
    assert state.fleet.resize({"generation": 2}, NOW)


def test_ranks_form_first_and_replay_before_anything_is_decoded_by_their_workers(context: JobContext) -> None:
    state = colocated_state(context)
    fresh(state)
    decisions = decided(context, state, NOW)
    assert d.FormGroup(2) in decisions
    assert asked(decisions, *SERVING) <= {"generation-2"}
    for rank in state.fleet.ranks():
        rank.roles, rank.group_epoch = frozenset({"training"}), 2
    decisions = decided(context, state, NOW)
    assert [item for item in decisions if isinstance(item, d.Train)] == [
        d.Train("generation-0", 0),
        d.Train("generation-1", 0),
    ]
    assert asked(decisions, *SERVING) == set(), "version 1 is nowhere yet"
    for rank in state.fleet.ranks():
        rank.trained_version = 1
    decisions = decided(context, state, NOW)
    assert asked(decisions, d.PrepareWorker) == {"generation-0", "generation-1", "generation-2"}
    assert asked(decisions, *TRAINING) == set()


def test_a_scored_batch_is_trained_and_published_in_turn(context: JobContext) -> None:
    state = colocated_state(context)
    assert asked(decided(context, state, NOW), d.Generate) == {f"generation-{n}" for n in range(3)}
    finish_all(state)
    assert decided(context, state, NOW) == [
        d.CommitBatch(),
        d.Train("generation-0", 1),
        d.Train("generation-1", 1),
    ]
    for rank in state.fleet.ranks():
        rank.trained_version = 2
    assert decided(context, state, NOW) == [d.CommitTrained()]
    state.ledger.train()
    state.trained = True
    loads = [item for item in decided(context, state, NOW) if isinstance(item, d.PrepareWorker)]
    assert [(item.worker, item.model, item.version) for item in loads] == [
        (f"generation-{n}", "actor", 2) for n in range(3)
    ]
    assert loads[0].command.load_weights.sources[0].address == state.fleet.workers["generation-0"].address
    pend(state, "generation-0", CommandKind.LOAD, from_ranks=True)
    state.fleet.workers["generation-1"].versions["actor"] = 1
    assert asked(decided(context, state, NOW), d.PrepareWorker) >= {"generation-1"}, "a rank that loads serves as well"
    assert iteration.decide(context, state, NOW).phase == "Publishing"


def test_a_lost_rank_takes_its_group_with_it_and_a_worker_without_a_rank_goes_on(context: JobContext) -> None:
    state = colocated_state(context)
    lost = state.fleet.workers["generation-1"]
    state.fleet.closed(lost.name, lost.session, NOW)
    assert "RestartGroup" not in kinds(decided(context, state, NOW + 1)), "a moment of grace"
    state.fleet.expire(NOW + 3)
    decisions = decided(context, state, NOW + 3)
    assert d.RestartGroup(("generation-0",), "generation-1 was lost", counted=False) in decisions
    assert "generation-2" in asked(decisions, d.Generate)
    (wait,) = [wait for wait in waits.waits(context, state) if wait.worker == "generation-1"]
    assert wait.fatal


@pytest.mark.parametrize(("command", "trains"), [("train", True), ("load_weights", False)])
def test_a_coordinator_that_comes_back_knows_a_train_from_a_load(
    context: JobContext, command: str, trains: bool
) -> None:
    state = colocated_state(context)
    finish_all(state)
    reported = pb.WorkerState(roles=WIRE.values(), versions={"actor": 1, "critic": 1}, trained_version=1, group_epoch=1)
    reported.busy, reported.command_id, reported.command = True, 7, command
    busy = pb.Register(worker="generation-0", group="generation", index=0, incarnation="1", state=reported)
    state.fleet.register(busy, 9, NOW)
    asked_now = asked(decided(context, state, NOW), d.Train)
    assert asked_now == ({"generation-1"} if trains else set()), "the one that got it waits for the one that did not"


def test_schedules_are_measured_when_nothing_is_decoded(context: JobContext) -> None:
    state = colocated_state(context)
    state.schedule.stage = "stages"
    decisions = decided(context, state, NOW)
    assert d.MeasureSchedule() in decisions
    assert asked(decisions, *SERVING) <= {"generation-2"}
    for stage in ("searching", "tables"):
        state.schedule.stage = stage
        decisions = decided(context, state, NOW)
        assert (asked(decisions, d.Generate), asked(decisions, *TRAINING)) == (
            {f"generation-{n}" for n in range(3)},
            set(),
        )
    finish_all(state)
    assert decided(context, state, NOW) == [d.MeasureSchedule()]


STATES = ("whole", "fresh", "behind", "ahead", "lost", "failed", "trains", "loads", "unknown", "joins")


def put(state: JobState, worker: Worker, standing: str) -> None:
    worker.trained_version = 2 + (standing == "ahead") - (standing == "behind")
    if standing == "fresh":
        worker.roles, worker.versions, worker.trained_version = frozenset(), {}, 0
    elif standing == "failed":
        worker.train_failure, worker.failed_at = pb.Failure(message="it broke", retryable=True), NOW
    elif standing in ("trains", "loads", "unknown"):
        work = {"trains": CommandKind.TRAIN, "loads": CommandKind.LOAD, "unknown": CommandKind.UNKNOWN}[standing]
        pend(state, worker.name, work, from_ranks=standing == "loads")
    elif standing == "joins":
        worker.roles = frozenset()
        pend(state, worker.name, CommandKind.BECOME, role="training")
    elif standing == "lost":
        state.fleet.closed(worker.name, worker.session, NOW - 10)
        state.fleet.expire(NOW)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_worker_is_ever_asked_for_both(context: JobContext, data: st.DataObject) -> None:
    state = colocated_state(context, at=2)
    state.schedule.stage = data.draw(st.sampled_from(["stages", "searching", "tables", "decided"]))
    finished = data.draw(st.sampled_from(["", "generated", "scored", "trained"]))
    if finished:
        finish_all(state, score=finished != "generated")
    if finished == "trained":
        state.ledger.train()
        state.trained = True
    for worker in state.fleet:
        put(state, worker, data.draw(st.sampled_from(STATES)))
    decisions = decided(context, state, NOW)
    trains = asked(decisions, d.Train)
    if asked(decisions, d.FormGroup, d.MeasureSchedule):
        trains |= {rank.name for rank in state.fleet.ranks()}
    assert not trains & asked(decisions, *SERVING)
    for worker in state.fleet:
        if worker.name in trains:
            assert worker.idle
            assert not state.ledger.decoding_on(worker.name)
