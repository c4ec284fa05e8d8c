"""Which workers count as connected, as a new process, or as lost."""

from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import make_job

from rlhf_api.protocol import PROTOCOL, mismatch
from rlhf_common import control_pb2 as pb
from rlhf_coordinator.state.fleet import GRACE_SECONDS, Cause, Fleet, Joined, Refused


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(make_job(tmp_path).spec, 0.0)


def register(fleet: Fleet, incarnation: str, session: int, now: float, **state: object) -> Joined | Refused:
    message = pb.Register(worker="generation-1", group="generation", index=1, incarnation=incarnation)
    message.state.CopyFrom(pb.WorkerState(**state))  # type: ignore[arg-type]
    return fleet.register(message, session, now)


def test_a_worker_that_comes_back_in_time_was_never_lost(fleet: Fleet) -> None:
    register(fleet, "x", 1, 0.0)
    fleet.closed("generation-1", 1, 10.0)
    assert fleet.expire(10.0 + GRACE_SECONDS) == []
    joined = register(fleet, "x", 2, 11.0, roles=[pb.WORKER_ROLE_GENERATION], versions={"actor": 3})
    assert isinstance(joined, Joined)
    assert not joined.restarted
    assert fleet.workers["generation-1"].versions == {"actor": 3}
    assert not fleet.closed("generation-1", 1, 12.0), "the end of the old session says nothing of the new one"


def test_broken_for_longer_than_the_grace_or_silent_for_too_long_is_lost(fleet: Fleet) -> None:
    register(fleet, "x", 1, 0.0, roles=[pb.WORKER_ROLE_GENERATION])
    fleet.closed("generation-1", 1, 10.0)
    assert [worker.name for worker in fleet.expire(10.1 + GRACE_SECONDS)] == ["generation-1"]
    assert fleet.expire(20.0) == [], "once"
    assert fleet.workers["generation-1"].roles == frozenset()
    register(fleet, "x", 2, 30.0)
    fleet.beat("generation-1", pb.Heartbeat(tokens=1), 33.0)
    assert fleet.expire(37.0) == []
    assert [worker.name for worker in fleet.expire(38.1)] == ["generation-1"]


def test_a_new_process_replaces_a_dead_one_but_not_a_live_one(fleet: Fleet) -> None:
    register(fleet, "x", 1, 0.0)
    refused = register(fleet, "y", 2, 1.0)
    assert isinstance(refused, Refused)
    assert "already connected from another live process" in refused.reason
    fleet.closed("generation-1", 1, 1.0)
    joined = register(fleet, "y", 3, 1.1)
    assert isinstance(joined, Joined)
    assert joined.restarted
    assert joined.worker.restarts == 1
    # Half dead: the stream is open, but nothing comes any more.
    assert isinstance(register(fleet, "z", 4, 10.0), Joined)


def test_strangers_are_told_who_is_wanted(fleet: Fleet) -> None:
    message = pb.Register(worker="generation-9", group="generation", index=9, incarnation="x")
    refused = fleet.register(message, 1, 0.0)
    assert isinstance(refused, Refused)
    assert "'generation-9' is not part of this job; it wants generation-0, generation-1, inference-0" in refused.reason


def test_rates_follow_from_heartbeats(fleet: Fleet) -> None:
    register(fleet, "x", 1, 0.0)
    fleet.beat("generation-1", pb.Heartbeat(tokens=100, busy_seconds=1.0), 1.0)
    fleet.beat("generation-1", pb.Heartbeat(tokens=300, busy_seconds=1.5), 2.0)
    assert fleet.workers["generation-1"].rates == (200.0, 0.5)


def test_a_rank_gets_on_with_training_when_its_count_of_pieces_moves(fleet: Fleet) -> None:
    register(fleet, "x", 1, 1.0)
    worker = fleet.workers["generation-1"]
    fleet.beat("generation-1", pb.Heartbeat(busy_seconds=1.0, training_pieces=1), 2.0)
    fleet.beat("generation-1", pb.Heartbeat(busy_seconds=2.0, training_pieces=1), 3.0)
    assert (worker.last_piece, worker.last_computing) == (2.0, 3.0)
    fleet.beat("generation-1", pb.Heartbeat(busy_seconds=3.0, training_pieces=4), 4.0)
    assert worker.last_piece == 4.0


def test_neighbouring_versions_join_and_others_are_told_why(tmp_path: Path) -> None:
    def joining(version: int) -> tuple[Fleet, Joined | Refused]:
        fleet = Fleet(make_job(tmp_path).spec, 0.0)
        message = pb.Register(worker="generation-1", group="generation", index=1, incarnation="x", protocol=version)
        return fleet, fleet.register(message, 1, 0.0)

    assert all(isinstance(joining(version)[1], Joined) for version in (PROTOCOL - 1, PROTOCOL, PROTOCOL + 1))
    version = PROTOCOL + 2
    fleet, answer = joining(version)
    assert isinstance(answer, Refused)
    assert answer.cause is Cause.INCOMPATIBLE
    assert answer.reason == mismatch("generation-1", version, PROTOCOL) == fleet.workers["generation-1"].refused
    register(fleet, "y", 2, 1.0)
    assert not fleet.workers["generation-1"].refused, "a process of the right image took its place"
