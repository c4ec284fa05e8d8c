"""When critics are trained apart from the policy, and what waits for them, from constructed states."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.job_states import NOW, decided, finish_all, pend, ready_state

from rlhf_api.job import RLHFJobSpec
from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_common.samples import VersionSpan
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling import iteration, training_overlap
from rlhf_coordinator.scheduling.training_schedule import candidates, schedule_json
from rlhf_coordinator.state.job_state import JobContext, JobState, OpenReport, StopOrder, job_context
from rlhf_coordinator.state.sample import PackedResponse
from rlhf_coordinator.state.worker import CommandKind

RANKS = ("training-0", "training-1")


def overlapping(folder: Path, **spec: Any) -> JobContext:
    """A job with 8 samples per iteration and a checkpoint after every second one."""
    training = {"parallelism": {"pipeline": 2}, "microBatchSize": 4, "criticOverlap": "Enabled"}
    job = make_job(folder, batch=8, iterations=6, training=training, **spec)
    return job_context(job, schedule_json(job.spec))


@pytest.fixture
def context(tmp_path: Path) -> JobContext:
    return overlapping(tmp_path)


def leave_critics(state: JobState, version: int) -> None:
    """Mark the ranks as having trained the policy to this version."""
    for name in RANKS:
        rank = state.fleet.workers[name]
        rank.trained_version = version
        rank.last_train = pb.TrainResult(iteration=version - 1, version=version, critics_behind=True)


def next_iteration(context: JobContext, at: int) -> JobState:
    """Start the iteration with all models except critics at version `at`."""
    state = ready_state(context, at=at)
    for worker in state.fleet.in_group(Group.INFERENCE):
        worker.versions["critic"] = at - 1
    leave_critics(state, at)
    state.open_report = OpenReport(at - 1, {"reward": 1.0})
    return state


def trains(context: JobContext, state: JobState) -> list[d.Train]:
    return [item for item in decided(context, state, NOW) if isinstance(item, d.Train)]


@pytest.mark.parametrize(
    ("at", "part"),
    [(0, pb.TRAIN_PART_POLICY), (1, pb.TRAIN_PART_ALL), (2, pb.TRAIN_PART_POLICY), (5, pb.TRAIN_PART_ALL)],
)
def test_the_policy_goes_first_where_no_checkpoint_follows(
    context: JobContext, at: int, part: pb.TrainPart.ValueType
) -> None:
    state = ready_state(context, at=at)
    finish_all(state)
    assert trains(context, state) == [d.Train(rank, at, part) for rank in RANKS]


def test_it_does_not_where_an_evaluation_follows_nor_in_a_replay(tmp_path: Path) -> None:
    context = overlapping(tmp_path, evaluation={"every": 3, "promptCount": 4})
    state = ready_state(context, at=2)
    finish_all(state)
    assert training_overlap.train_part(context, state, 2) == pb.TRAIN_PART_ALL
    assert training_overlap.train_part(context, ready_state(context, at=4), 4) == pb.TRAIN_PART_POLICY
    replay = ready_state(context, at=4)
    for name in RANKS:
        replay.fleet.workers[name].trained_version = 2
    assert trains(context, replay) == [d.Train(rank, 2) for rank in RANKS]


def test_what_the_policy_is_trained_to_is_written_down_before_any_critic_is_trained(context: JobContext) -> None:
    state = ready_state(context, at=2)
    finish_all(state)
    leave_critics(state, 3)
    assert decided(context, state, NOW) == [d.CommitTrained()]


def test_the_policy_alone_is_published_and_the_iteration_closed(context: JobContext) -> None:
    state = ready_state(context, at=2)
    finish_all(state)
    state.ledger.train()
    leave_critics(state, 3)
    state.trained = state.critic_update_pending = True
    decisions = decided(context, state, NOW)
    assert iteration.decide(context, state, NOW).phase == "Publishing"
    assert [item.worker for item in decisions if isinstance(item, d.PrepareWorker)] == ["generation-0", "generation-1"]
    assert not trains(context, state)
    for worker in state.fleet.in_group(Group.GENERATION):
        worker.versions["actor"] = 3
    assert decided(context, state, NOW) == [d.CloseIteration(awaits="critics")]


def test_the_last_iteration_is_closed_with_the_metrics_of_its_critics(context: JobContext) -> None:
    last = context.spec.iterations - 1
    state = ready_state(context, at=last, version=last + 1)
    finish_all(state)
    state.ledger.train()
    state.trained = state.critic_update_pending = True
    state.checkpoint.newest = state.version
    assert decided(context, state, NOW) == [d.CloseIteration(last=True, late_critics=True), d.Finish("Complete")]


def test_critics_train_beside_decoding_and_are_loaded_when_they_are_whole(context: JobContext) -> None:
    state = next_iteration(context, 3)
    decisions = decided(context, state, NOW)
    assert trains(context, state) == [d.Train(rank, 2, pb.TRAIN_PART_CRITICS) for rank in RANKS]
    assert [item.worker for item in decisions if isinstance(item, d.Generate)] == ["generation-0", "generation-1"]
    assert not [item for item in decisions if isinstance(item, d.PrepareWorker)], "nobody loads critics that are behind"
    for name in RANKS:
        pend(state, name, CommandKind.TRAIN)
    assert not trains(context, state)
    for name in RANKS:
        state.fleet.workers[name].pending.clear()
        state.fleet.workers[name].last_train = pb.TrainResult(iteration=2, version=3)
    decisions = decided(context, state, NOW)
    assert d.ReportCritics() in decisions
    loads = [item for item in decisions if isinstance(item, d.PrepareWorker)]
    assert [(item.worker, item.model, item.version) for item in loads] == [
        ("inference-0", "critic", 3),
        ("inference-1", "critic", 3),
    ]


def test_no_critic_trains_while_a_worker_reads_and_none_is_read_while_it_trains(context: JobContext) -> None:
    state = next_iteration(context, 3)
    pend(state, "generation-0", CommandKind.LOAD, from_ranks=True)
    assert not trains(context, state)
    late = next_iteration(context, 3)
    late.fleet.workers["generation-0"].versions["actor"] = 2
    assert len(trains(context, late)) == 2
    assert not [item for item in decided(context, late, NOW) if isinstance(item, d.PrepareWorker)]


def test_a_stop_waits_for_critics_that_are_behind(context: JobContext) -> None:
    state = next_iteration(context, 3)
    state.stop = StopOrder(checkpoint=True, reason="asked")
    assert decided(context, state, NOW) == [d.Train(rank, 2, pb.TRAIN_PART_CRITICS) for rank in RANKS]
    for name in RANKS:
        state.fleet.workers[name].last_train = pb.TrainResult(iteration=2, version=3)
    assert decided(context, state, NOW) == [d.ReportCritics(), d.SaveCheckpoint(3)]


def finished(state: JobState, *indices: int) -> None:
    """Mark the responses of these samples as finished."""
    for index in indices:
        response = PackedResponse(b"\1\0\0\0", b"\0\0\0\0", (VersionSpan(state.iteration, 1),))
        state.ledger.finish(index, state.ledger.assign(index, "w"), "w", response, "stop", "")


def asked(decisions: list[d.Decision]) -> dict[str, set[str]]:
    """Return worker -> its scoring tasks."""
    tasks_by_worker: dict[str, set[str]] = {}
    for item in decisions:
        if isinstance(item, d.Score):
            tasks_by_worker.setdefault(item.worker, set()).update(task for _, tasks in item.samples for task in tasks)
    return tasks_by_worker


def test_only_values_wait_for_the_critics(context: JobContext) -> None:
    state = next_iteration(context, 3)
    finished(state, 0, 1)
    others = {task.name for task in context.tasks if task.model != "critic"}
    assert others, "the reference and the reward score too"
    tasks_by_worker = asked(decided(context, state, NOW))
    assert set().union(*tasks_by_worker.values()) == others
    for name, tasks in tasks_by_worker.items():
        for index in (0, 1):
            ready = sorted(tasks & set(state.ledger.samples[index].open_tasks))
            if ready:
                state.ledger.assign_scores(index, ready, name)
    assert not asked(decided(context, state, NOW)), "nothing is given twice"
    for name in RANKS:
        state.fleet.workers[name].last_train = pb.TrainResult(iteration=2, version=3)
    for worker in state.fleet.in_group(Group.INFERENCE):
        worker.versions["critic"] = 3
    assert set().union(*asked(decided(context, state, NOW)).values()) == {
        task.name for task in context.tasks if task.model == "critic"
    }


def test_a_worker_that_has_the_critics_already_scores_values_and_the_others_the_rest(context: JobContext) -> None:
    state = next_iteration(context, 3)
    state.fleet.workers["inference-1"].versions["critic"] = 3  # as when it is there before the last rank has answered
    finished(state, *range(8))
    tasks_by_worker = asked(decided(context, state, NOW))
    values = {task.name for task in context.tasks if task.model == "critic"}
    assert values <= tasks_by_worker["inference-1"]
    assert not values & tasks_by_worker["inference-0"]
    assert tasks_by_worker["inference-0"], "who lacks the critics does what needs none"


def test_nobody_scores_by_weights_of_before_when_no_critics_are_behind(context: JobContext) -> None:
    state = next_iteration(context, 3)
    for name in RANKS:
        state.fleet.workers[name].last_train = pb.TrainResult(iteration=2, version=3)
    finished(state, 0)
    assert not asked(decided(context, state, NOW)), "the critics are loaded, which comes first"


def test_in_mode_auto_an_iteration_does_what_it_said_when_it_began(tmp_path: Path) -> None:
    training = {"parallelism": {"pipeline": 2}, "microBatchSize": 4, "criticOverlap": "Auto"}
    job = make_job(tmp_path, batch=8, iterations=6, training=training)
    context = job_context(job, schedule_json(job.spec))
    for apart, at, part in (
        (True, 2, pb.TRAIN_PART_POLICY),
        (False, 2, pb.TRAIN_PART_ALL),
        (True, 1, pb.TRAIN_PART_ALL),  # a checkpoint follows
    ):
        state = ready_state(context, at=at)
        state.critic_overlap.apart = apart
        finish_all(state)
        assert trains(context, state) == [d.Train(rank, at, part) for rank in RANKS]


def test_in_mode_auto_a_fused_table_may_be_chosen_as_without_the_overlap(tmp_path: Path) -> None:
    def spec(overlap: str) -> RLHFJobSpec:
        training = {"parallelism": {"pipeline": 2}, "microBatchSize": 4, "criticOverlap": overlap}
        fusion = {"intraStage": {"mode": "Auto"}, "interStage": {"mode": "Disabled"}}
        return make_job(tmp_path, batch=8, training=training, fusion=fusion).spec

    assert candidates(spec("Auto")) == candidates(spec("Disabled")) != ()
    assert schedule_json(spec("Auto")) == schedule_json(spec("Disabled"))
    assert candidates(spec("Enabled")) == ()
