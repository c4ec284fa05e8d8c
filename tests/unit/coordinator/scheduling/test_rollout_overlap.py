"""An iteration that decodes beside the previous training waits for the right things, from constructed states."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.job_states import NOW, decided, finish_all, pend, ready_state

from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling import iteration
from rlhf_coordinator.scheduling.training_overlap import overlaps_training
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.job_state import JobContext, JobState, OpenReport, StopOrder, job_context
from rlhf_coordinator.state.worker import CommandKind

RANKS = ("training-0", "training-1")
SERVING = ("generation-0", "generation-1", "inference-0", "inference-1")


def overlapping(folder: Path, mode: str = "Enabled", **spec: Any) -> JobContext:
    """A job with 8 samples per iteration and a checkpoint after every second one."""
    training = {"parallelism": {"pipeline": 2}, "microBatchSize": 4}
    job = make_job(folder, batch=8, iterations=6, training=training, **spec)
    rollout = job.spec.rollout.model_copy(update={"overlap_training": mode})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"rollout": rollout})})
    return job_context(job, schedule_json(job.spec))


@pytest.fixture
def context(tmp_path: Path) -> JobContext:
    return overlapping(tmp_path)


def beside(context: JobContext, at: int, *, last: bool = False) -> JobState:
    """An iteration that decodes with version `at` - 1, before any rank has started to train on its previous batch."""
    state = ready_state(context, at=at, version=at - 1)
    state.ledger.version, state.overlaps_training = at - 1, not last
    state.open_report = OpenReport(at - 1, {"reward": 1.0})
    return state


def trained(state: JobState, version: int) -> None:
    """Mark the ranks as having trained to this version, while they still serve the previous one."""
    for name in RANKS:
        rank = state.fleet.workers[name]
        rank.pending.clear()
        rank.trained_version = version
        rank.last_train = pb.TrainResult(iteration=version - 1, version=version)
        rank.heartbeat.kept_version = version - 1


def of_kind(decisions: list[d.Decision], kind: type[Any]) -> list[Any]:
    return [item for item in decisions if isinstance(item, kind)]


def test_it_holds_but_before_checkpoints_evaluations_and_the_end(tmp_path: Path) -> None:
    context = overlapping(tmp_path, evaluation={"every": 3, "promptCount": 4})
    assert [overlaps_training(context, number) for number in range(6)] == [True, False, False, False, True, False]
    assert not any(overlaps_training(overlapping(tmp_path, "Disabled"), number) for number in range(6))


def test_a_complete_batch_closes_its_iteration_before_it_is_trained_on(context: JobContext) -> None:
    state = ready_state(context, at=2)
    state.overlaps_training = True
    finish_all(state)
    assert decided(context, state, NOW) == [d.CloseIteration(awaits="training")]


def test_the_next_one_decodes_while_ranks_train_and_keep_what_it_decodes_by(context: JobContext) -> None:
    state = beside(context, 3)
    decisions = decided(context, state, NOW)
    assert of_kind(decisions, d.Train) == [d.Train(rank, 2, keep=True) for rank in RANKS]
    assert {item.worker for item in of_kind(decisions, d.Generate)} == {"generation-0", "generation-1"}
    assert not of_kind(decisions, d.PrepareWorker)
    trained(state, 3)
    decisions = decided(context, state, NOW)
    assert d.ReportCritics() in decisions
    assert not of_kind(decisions, d.PrepareWorker), "no weights change before the batch is complete"


def test_a_worker_that_comes_back_gets_what_the_others_decode_by_once_ranks_say_that_they_keep_it(
    context: JobContext,
) -> None:
    state = beside(context, 3)
    for name in RANKS:
        pend(state, name, CommandKind.TRAIN)
    back = state.fleet.workers["generation-1"]
    back.versions, back.roles = {}, frozenset()
    assert not of_kind(decided(context, state, NOW), d.PrepareWorker)
    for name in RANKS:
        state.fleet.workers[name].heartbeat.kept_version = 2
    (load,) = of_kind(decided(context, state, NOW), d.PrepareWorker)
    assert (load.worker, load.version, load.from_ranks) == ("generation-1", 2, True)


@pytest.mark.parametrize("lost", ["generation-1", "inference-1"])
def test_version_0_comes_from_its_folder_as_no_heartbeat_tells_whether_a_rank_keeps_it(
    context: JobContext, lost: str
) -> None:
    state = beside(context, 1)
    for name in RANKS:
        pend(state, name, CommandKind.TRAIN)
        assert state.fleet.workers[name].heartbeat.kept_version == 0
    back = state.fleet.workers[lost]
    back.versions, back.roles = {}, frozenset()
    (load,) = of_kind(decided(context, state, NOW), d.PrepareWorker)
    assert (load.worker, load.version, load.from_ranks) == (lost, 0, False)
    role = load.command.WhichOneof("command")
    loads = (
        [load.command.become_generation.weights]
        if role == "become_generation"
        else load.command.become_inference.weights
    )
    assert all(source.folder and not source.address for weights in loads for source in weights.sources)


def test_a_complete_batch_waits_for_the_training_before_it_and_its_weights(context: JobContext) -> None:
    state = beside(context, 3)
    finish_all(state)
    for name in RANKS:
        pend(state, name, CommandKind.TRAIN)
    assert iteration.decide(context, state, NOW).phase == "Training"
    assert not decided(context, state, NOW)
    trained(state, 3)
    state.open_report = None
    assert iteration.decide(context, state, NOW).phase == "Publishing"
    loads = of_kind(decided(context, state, NOW), d.PrepareWorker)
    assert {item.worker for item in loads} == set(SERVING)
    assert {item.version for item in loads} == {3}
    for worker in (*state.fleet.in_group(Group.GENERATION), *state.fleet.in_group(Group.INFERENCE)):
        worker.versions = dict.fromkeys(worker.versions, 3)
    assert decided(context, state, NOW) == [d.CloseIteration(awaits="training")]


def test_the_last_iteration_is_trained_on_after_the_one_before(context: JobContext) -> None:
    state = beside(context, 5, last=True)
    finish_all(state)
    decisions = decided(context, state, NOW)
    assert of_kind(decisions, d.Train) == [d.Train(rank, 4, keep=True) for rank in RANKS]
    trained(state, 5)
    pend(state, "training-1", CommandKind.TRAIN)
    assert not decided(context, state, NOW), "the faster rank waits until what both trained on is reported"
    trained(state, 5)
    assert decided(context, state, NOW) == [d.ReportCritics()]
    state.open_report = None
    assert of_kind(decided(context, state, NOW), d.Train) == [d.Train(rank, 5) for rank in RANKS]


def test_a_job_that_stops_saves_no_version_that_its_iteration_cannot_go_on_from(context: JobContext) -> None:
    state = beside(context, 3)
    trained(state, 3)
    state.open_report, state.stop = None, StopOrder(checkpoint=True, reason="asked")
    assert decided(context, state, NOW) == [d.Finish("Stopped")]
    whole = ready_state(context, at=2)
    whole.stop, whole.overlaps_training = state.stop, True
    assert decided(context, whole, NOW) == [d.SaveCheckpoint(2)]
