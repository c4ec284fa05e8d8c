"""Ranks whose machines ask them to end, with or without the coordinator: which ones stay, and until when."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.coordinator.job_states import NOW, decided, finish_all, kinds, pend, ready_state

from rlhf_api.job.policy import Checkpoints
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling.iteration_end import TOGETHER_SECONDS
from rlhf_coordinator.state.job_state import JobContext, JobState, StopOrder
from rlhf_coordinator.state.worker import CommandKind

LATER = NOW + TOGETHER_SECONDS + 0.5


@pytest.fixture
def saving(context: JobContext, tmp_path: Path) -> JobContext:
    checkpoints = Checkpoints(path=str(tmp_path), every=1000)
    spec = context.job.spec.model_copy(update={"checkpoints": checkpoints})
    return replace(context, job=context.job.model_copy(update={"spec": spec}))


@pytest.fixture
def bare(context: JobContext) -> JobContext:
    spec = context.job.spec.model_copy(update={"checkpoints": None})
    return replace(context, job=context.job.model_copy(update={"spec": spec}))


def ask(state: JobState, *names: str) -> None:
    for name in names:
        state.fleet.beat(name, pb.Heartbeat(leaving=True), NOW)


def about_ranks(decisions: list[d.Decision]) -> list[d.Decision]:
    return [
        decision for decision in decisions if isinstance(decision, d.ExitWorker | d.SaveCheckpoint | d.Train | d.Finish)
    ]


def test_a_rank_that_is_asked_alone_goes_after_a_checkpoint_of_what_its_group_holds(saving: JobContext) -> None:
    state = ready_state(saving, at=3)
    ask(state, "training-1")
    assert about_ranks(decided(saving, state, NOW + 1)) == [], "the coordinator may be asked too"
    assert about_ranks(decided(saving, state, LATER)) == [d.SaveCheckpoint(3)]
    state.checkpoint.stage = "saving"
    assert about_ranks(decided(saving, state, LATER)) == []
    state.checkpoint.stage, state.checkpoint.newest = "idle", 3
    (leave,) = about_ranks(decided(saving, state, LATER))
    assert leave == d.ExitWorker("training-1", ExitCode.OK, "it was asked to end, and is not needed now")


def test_without_checkpoints_it_goes_when_it_is_idle(bare: JobContext) -> None:
    state = ready_state(bare, at=3)
    ask(state, "training-0")
    pend(state, "training-0", CommandKind.TRAIN)
    assert about_ranks(decided(bare, state, LATER)) == []
    state.fleet.workers["training-0"].pending.clear()
    assert [item.worker for item in decided(bare, state, LATER) if isinstance(item, d.ExitWorker)] == ["training-0"]


def test_a_training_that_is_under_way_ends_first_and_a_new_one_is_not_begun(saving: JobContext) -> None:
    state = ready_state(saving, at=3)
    finish_all(state)
    assert "Train" in kinds(decided(saving, state, NOW))
    ask(state, "training-1")
    assert "Train" not in kinds(decided(saving, state, NOW + 1))

    for rank in ("training-0", "training-1"):
        pend(state, rank, CommandKind.TRAIN)
    assert about_ranks(decided(saving, state, LATER)) == []


def test_a_coordinator_that_ends_with_its_ranks_has_them_for_its_checkpoint(saving: JobContext) -> None:
    state = ready_state(saving, at=3)
    ask(state, "training-0", "training-1")
    state.stop = StopOrder(True, "asked to stop by a signal")
    assert about_ranks(decided(saving, state, LATER)) == [d.SaveCheckpoint(3)]
    state.checkpoint.newest = 3
    assert about_ranks(decided(saving, state, LATER)) == [d.Finish("Stopped")]


def test_a_worker_without_a_rank_that_is_asked_changes_nothing_for_the_ranks(saving: JobContext) -> None:
    state = ready_state(saving, at=3)
    ask(state, "generation-0")
    assert about_ranks(decided(saving, state, LATER)) == []
