"""Ranks that their machines ask to end, alone or together with the coordinator: who stays for what."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.coordinator.deciding.test_iteration import NOW, finish_all, kinds, pend, plan, world_of

from rlhf_api import control_pb2 as pb
from rlhf_api.job.policy import Checkpoints
from rlhf_api.names import ExitCode
from rlhf_operator.coordinator.deciding import decisions as d
from rlhf_operator.coordinator.deciding import iteration
from rlhf_operator.coordinator.deciding.iteration import TOGETHER_SECONDS
from rlhf_operator.coordinator.world.worker import Work
from rlhf_operator.coordinator.world.world import Plan, StopOrder, World

__all__ = ["plan"]
LATER = NOW + TOGETHER_SECONDS + 0.5


@pytest.fixture
def saving(plan: Plan, tmp_path: Path) -> Plan:
    checkpoints = Checkpoints(path=str(tmp_path), every=1000)
    spec = plan.job.spec.model_copy(update={"checkpoints": checkpoints})
    return replace(plan, job=plan.job.model_copy(update={"spec": spec}))


@pytest.fixture
def bare(plan: Plan) -> Plan:
    spec = plan.job.spec.model_copy(update={"checkpoints": None})
    return replace(plan, job=plan.job.model_copy(update={"spec": spec}))


def ask(world: World, *names: str) -> None:
    for name in names:
        world.fleet.beat(name, pb.Heartbeat(leaving=True), NOW)


def about_ranks(decisions: list[d.Decision]) -> list[d.Decision]:
    return [each for each in decisions if isinstance(each, d.Leave | d.SaveCheckpoint | d.Train | d.Finish)]


def test_a_rank_that_is_asked_alone_goes_after_a_checkpoint_of_what_its_group_holds(saving: Plan) -> None:
    world = world_of(saving, at=3)
    ask(world, "training-1")
    assert about_ranks(iteration.decide(saving, world, NOW + 1)) == [], "the coordinator may be asked too"
    assert about_ranks(iteration.decide(saving, world, LATER)) == [d.SaveCheckpoint(3)]
    world.checkpoint.stage = "saving"
    assert about_ranks(iteration.decide(saving, world, LATER)) == []
    world.checkpoint.stage, world.checkpoint.newest = "idle", 3
    (leave,) = about_ranks(iteration.decide(saving, world, LATER))
    assert leave == d.Leave("training-1", ExitCode.OK, "it was asked to end, and is not needed now")


def test_without_checkpoints_it_goes_when_it_is_idle(bare: Plan) -> None:
    world = world_of(bare, at=3)
    ask(world, "training-0")
    pend(world, "training-0", Work.TRAIN)
    assert about_ranks(iteration.decide(bare, world, LATER)) == []
    world.fleet.workers["training-0"].pending.clear()
    assert [each.worker for each in iteration.decide(bare, world, LATER) if isinstance(each, d.Leave)] == ["training-0"]


def test_a_training_that_is_under_way_ends_first_and_a_new_one_is_not_begun(saving: Plan) -> None:
    world = world_of(saving, at=3)
    finish_all(world)
    assert "Train" in kinds(iteration.decide(saving, world, NOW))
    ask(world, "training-1")
    assert "Train" not in kinds(iteration.decide(saving, world, NOW + 1))

    for rank in ("training-0", "training-1"):
        pend(world, rank, Work.TRAIN)
    assert about_ranks(iteration.decide(saving, world, LATER)) == []


def test_a_coordinator_that_ends_with_its_ranks_has_them_for_its_checkpoint(saving: Plan) -> None:
    world = world_of(saving, at=3)
    ask(world, "training-0", "training-1")
    world.stop = StopOrder(True, "asked to stop by a signal")
    assert about_ranks(iteration.decide(saving, world, LATER)) == [d.SaveCheckpoint(3)]
    world.checkpoint.newest = 3
    assert about_ranks(iteration.decide(saving, world, LATER)) == [d.Finish("Stopped")]


def test_a_worker_without_a_rank_is_not_kept(saving: Plan) -> None:
    world = world_of(saving, at=3)
    ask(world, "generation-0")
    assert about_ranks(iteration.decide(saving, world, LATER)) == []
