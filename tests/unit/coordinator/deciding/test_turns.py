"""A generation worker that holds a training rank is asked to decode and score, or to train, never both."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.coordinated import make_job
from tests.unit.coordinator.deciding.test_iteration import NOW, finish_all, kinds, pend, world_of

from rlhf_api import control_pb2 as pb
from rlhf_operator.coordinator.deciding import decisions as d
from rlhf_operator.coordinator.deciding import iteration, training_group, waits
from rlhf_operator.coordinator.deciding.schedule import schedule_json
from rlhf_operator.coordinator.world.worker import Work, Worker
from rlhf_operator.coordinator.world.world import Plan, World, plan_of

EVERY = "generation+inference+training"
TRAINING = (d.Form, d.Train, d.MeasureSchedule)
SERVING = (d.Generate, d.Score, d.Become, d.MeasureWork, d.Migrate)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    generation = {"replicas": 3, "maxBatchSize": 6}
    job = make_job(
        tmp_path_factory.mktemp("job"), batch=8, placement="Colocated", inference={"replicas": 0}, generation=generation
    )
    return plan_of(job, schedule_json(job.spec))


def together(plan: Plan, at: int = 1) -> World:
    """Three generation workers with everything; the first two hold the ranks."""
    world = world_of(plan, at=at)
    for worker in world.fleet:
        worker.versions = {"actor": at, "critic": at}
        worker.role = EVERY if worker.rank is not None else "generation+inference"
    return world


def fresh(world: World) -> None:
    for worker in world.fleet:
        worker.role, worker.versions, worker.trained_version = "", {}, 0


def asked(decisions: list[d.Decision], *of: type) -> set[str]:
    return {str(getattr(item, "worker", "")) for item in decisions if isinstance(item, of)}


def test_there_is_no_training_group_of_its_own(plan: Plan) -> None:
    world = together(plan)
    assert [worker.name for worker in world.fleet] == ["generation-0", "generation-1", "generation-2"]
    assert [rank.name for rank in training_group.ranks(world)] == ["generation-0", "generation-1"]
    assert training_group.version(world) == 1
    with pytest.raises(ValueError, match="generation = 1: must be 2 to 4096, the first of which hold the training"):
        world.fleet.resize({"generation": 1}, NOW)
    assert world.fleet.resize({"generation": 2}, NOW)


def test_ranks_form_first_and_replay_before_anything_is_decoded_by_their_workers(plan: Plan) -> None:
    world = together(plan)
    fresh(world)
    decisions = iteration.decide(plan, world, NOW)
    assert d.Form(2) in decisions
    assert asked(decisions, *SERVING) <= {"generation-2"}
    for rank in training_group.ranks(world):
        rank.role, rank.group_epoch = "training", 2
    decisions = iteration.decide(plan, world, NOW)
    assert [item for item in decisions if isinstance(item, d.Train)] == [
        d.Train("generation-0", 0),
        d.Train("generation-1", 0),
    ]
    assert asked(decisions, *SERVING) == set(), "version 1 is nowhere yet"
    for rank in training_group.ranks(world):
        rank.trained_version = 1
    decisions = iteration.decide(plan, world, NOW)
    assert asked(decisions, d.Become) == {"generation-0", "generation-1", "generation-2"}
    assert asked(decisions, *TRAINING) == set()


def test_a_scored_batch_is_trained_and_published_in_turn(plan: Plan) -> None:
    world = together(plan)
    assert asked(iteration.decide(plan, world, NOW), d.Generate) == {f"generation-{n}" for n in range(3)}
    finish_all(world)
    assert iteration.decide(plan, world, NOW) == [
        d.CommitBatch(),
        d.Train("generation-0", 1),
        d.Train("generation-1", 1),
    ]
    for rank in training_group.ranks(world):
        rank.trained_version = 2
    assert iteration.decide(plan, world, NOW) == [d.CommitTrained()]
    world.ledger.train()
    world.trained = True
    loads = [item for item in iteration.decide(plan, world, NOW) if isinstance(item, d.Become)]
    assert [(item.worker, item.model, item.version) for item in loads] == [
        (f"generation-{n}", "actor", 2) for n in range(3)
    ]
    assert loads[0].command.load_weights.sources[0].address == world.fleet.workers["generation-0"].address
    pend(world, "generation-0", Work.LOAD, from_ranks=True)
    world.fleet.workers["generation-1"].versions["actor"] = 1
    assert asked(iteration.decide(plan, world, NOW), d.Become) >= {"generation-1"}, "a rank that loads serves as well"
    assert iteration.phase(plan, world) == "Publishing"


def test_a_lost_rank_takes_its_group_with_it_and_a_worker_without_a_rank_goes_on(plan: Plan) -> None:
    world = together(plan)
    lost = world.fleet.workers["generation-1"]
    world.fleet.closed(lost.name, lost.session, NOW)
    assert "RestartGroup" not in kinds(iteration.decide(plan, world, NOW + 1)), "a moment of grace"
    world.fleet.expire(NOW + 3)
    decisions = iteration.decide(plan, world, NOW + 3)
    assert d.RestartGroup(("generation-0",), "generation-1 was lost", counted=False) in decisions
    assert "generation-2" in asked(decisions, d.Generate)
    (wait,) = [wait for wait in waits.waits(plan, world) if wait.worker == "generation-1"]
    assert wait.fatal


@pytest.mark.parametrize(("command", "trains"), [("train", True), ("load_weights", False)])
def test_a_coordinator_that_comes_back_knows_a_train_from_a_load(plan: Plan, command: str, trains: bool) -> None:
    world = together(plan)
    finish_all(world)
    state = pb.WorkerState(role=EVERY, versions={"actor": 1, "critic": 1}, trained_version=1, group_epoch=1)
    state.busy, state.command_id, state.command = True, 7, command
    busy = pb.Register(worker="generation-0", group="generation", index=0, incarnation="1", state=state)
    world.fleet.register(busy, 9, NOW)
    asked_now = asked(iteration.decide(plan, world, NOW), d.Train)
    assert asked_now == ({"generation-1"} if trains else set()), "the one that got it waits for the one that did not"


def test_schedules_are_measured_when_nothing_is_decoded(plan: Plan) -> None:
    world = together(plan)
    world.schedule.stage = "stages"
    decisions = iteration.decide(plan, world, NOW)
    assert d.MeasureSchedule() in decisions
    assert asked(decisions, *SERVING) <= {"generation-2"}
    for stage in ("searching", "tables"):
        world.schedule.stage = stage  # type: ignore[assignment]
        decisions = iteration.decide(plan, world, NOW)
        assert (asked(decisions, d.Generate), asked(decisions, *TRAINING)) == (
            {f"generation-{n}" for n in range(3)},
            set(),
        )
    finish_all(world)
    assert iteration.decide(plan, world, NOW) == [d.MeasureSchedule()]


STATES = ("whole", "fresh", "behind", "ahead", "lost", "failed", "trains", "loads", "unknown", "joins")


def put(world: World, worker: Worker, state: str) -> None:
    worker.trained_version = 2 + (state == "ahead") - (state == "behind")
    if state == "fresh":
        worker.role, worker.versions, worker.trained_version = "", {}, 0
    elif state == "failed":
        worker.train_failure, worker.failed_at = pb.Failure(message="it broke", retryable=True), NOW
    elif state in ("trains", "loads", "unknown"):
        work = {"trains": Work.TRAIN, "loads": Work.LOAD, "unknown": Work.UNKNOWN}[state]
        pend(world, worker.name, work, from_ranks=state == "loads")
    elif state == "joins":
        worker.role = ""
        pend(world, worker.name, Work.BECOME, role="training")
    elif state == "lost":
        world.fleet.closed(worker.name, worker.session, NOW - 10)
        world.fleet.expire(NOW)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_worker_is_ever_asked_for_both(plan: Plan, data: st.DataObject) -> None:
    world = together(plan, at=2)
    world.schedule.stage = data.draw(st.sampled_from(["stages", "searching", "tables", "decided"]))
    finished = data.draw(st.sampled_from(["", "generated", "scored", "trained"]))
    if finished:
        finish_all(world, score=finished != "generated")
    if finished == "trained":
        world.ledger.train()
        world.trained = True
    for worker in world.fleet:
        put(world, worker, data.draw(st.sampled_from(STATES)))
    decisions = iteration.decide(plan, world, NOW)
    trains = asked(decisions, d.Train)
    if asked(decisions, d.Form, d.MeasureSchedule):
        trains |= {rank.name for rank in training_group.ranks(world)}
    assert not trains & asked(decisions, *SERVING)
    for worker in world.fleet:
        if worker.name in trains:
            assert worker.idle
            assert not world.ledger.decoding_on(worker.name)
