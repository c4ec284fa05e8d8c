"""A fleet that grows and shrinks while workers come and go."""

from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import make_job

from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_coordinator.state.fleet import GRACE_SECONDS, Fleet, Joined, Refused


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(make_job(tmp_path).spec, 0.0)


def register(fleet: Fleet, index: int, session: int, now: float, incarnation: str = "x") -> Joined | Refused:
    message = pb.Register(worker=f"generation-{index}", group="generation", index=index, incarnation=incarnation)
    return fleet.register(message, session, now)


def generation(fleet: Fleet) -> list[str]:
    return [worker.name for worker in fleet.in_group(Group.GENERATION)]


def test_a_new_worker_is_let_in_once_the_group_has_grown(fleet: Fleet) -> None:
    assert isinstance(register(fleet, 2, 1, 1.0), Refused)
    assert fleet.resize({"generation": 3}, 2.0)
    assert not fleet.resize({"generation": 3}, 3.0), "asking again changes nothing"
    assert isinstance(register(fleet, 2, 2, 4.0), Joined)
    assert generation(fleet) == ["generation-0", "generation-1", "generation-2"]


def test_a_worker_beyond_the_size_counts_until_it_is_lost_and_then_nobody_waits_for_it(fleet: Fleet) -> None:
    register(fleet, 1, 1, 0.0)
    fleet.resize({"generation": 1}, 1.0)
    assert generation(fleet) == ["generation-0", "generation-1"]
    fleet.closed("generation-1", 1, 2.0)
    assert generation(fleet) == ["generation-0", "generation-1"], "what it holds is not given back yet"
    assert [worker.name for worker in fleet.expire(2.1 + GRACE_SECONDS)] == ["generation-1"]
    assert generation(fleet) == ["generation-0"]
    assert isinstance(register(fleet, 1, 2, 9.0), Refused)


def test_one_that_never_came_is_forgotten_at_once(fleet: Fleet) -> None:
    fleet.resize({"generation": 1}, 1.0)
    assert generation(fleet) == ["generation-0"]


def test_inference_may_be_left_to_generation_workers(fleet: Fleet) -> None:
    assert fleet.resize({"inference": 0}, 1.0)
    assert fleet.in_group(Group.INFERENCE) == []
    assert fleet.resize({"inference": 2}, 2.0)
    assert len(fleet.in_group(Group.INFERENCE)) == 2


def test_a_worker_that_is_wanted_again_starts_anew_and_others_keep_what_they_are(fleet: Fleet) -> None:
    register(fleet, 0, 1, 0.0)
    register(fleet, 1, 2, 0.0)
    worker = fleet.workers["generation-0"]
    fleet.resize({"generation": 1}, 1.0)
    fleet.closed("generation-1", 2, 2.0)
    fleet.expire(5.0)
    fleet.resize({"generation": 2}, 6.0)
    assert fleet.workers["generation-0"] is worker
    assert not fleet.workers["generation-1"].seen
    assert isinstance(register(fleet, 1, 3, 7.0, "y"), Joined)


@pytest.mark.parametrize(
    "replicas", [{"training": 4}, {"generation": 0}, {"inference": 5000}, {"inference": -1}, {"coordinator": 1}]
)
def test_what_cannot_be_is_refused_by_name(fleet: Fleet, replicas: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(replicas))):
        fleet.resize(replicas, 1.0)
