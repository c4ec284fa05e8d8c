"""Decisions of the scheduler, from constructed states."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.job_states import NOW, decided, finish_all, kinds, pend, ready_state

from rlhf_api.algorithms.graph import GENERATE, SCORE_REWARD, SCORE_VALUES, TRAIN_ACTOR, Graph, Scope
from rlhf_api.algorithms.refill import RefillRule, UsedUp
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode, Group
from rlhf_common.samples import VersionSpan
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling import iteration, waits
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.fleet import Fleet
from rlhf_coordinator.state.fusion_state import fusion_state
from rlhf_coordinator.state.job_state import JobContext, JobState, StopOrder, job_context
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse
from rlhf_coordinator.state.worker import CommandKind, PendingCommand


def test_samples_go_to_the_least_loaded_workers_with_current_weights(context: JobContext) -> None:
    state = ready_state(context)
    assert decided(context, state, NOW) == [
        d.Generate("generation-0", (0, 2, 4, 6)),
        d.Generate("generation-1", (1, 3, 5, 7)),
    ]
    state.fleet.workers["generation-1"].versions["actor"] = 5
    decisions = decided(context, state, NOW)
    # 6 samples at once and one more; the stale worker is sent the weights of version 0 from their folder.
    assert d.Generate("generation-0", (0, 1, 2, 3, 4, 5, 6)) in decisions
    (load,) = [item for item in decisions if isinstance(item, d.PrepareWorker)]
    assert (load.worker, load.command.load_weights.version) == ("generation-1", 0)
    assert load.command.load_weights.sources[0].folder.endswith("policy")


def test_a_restarted_engine_gets_no_samples_before_its_weights(context: JobContext) -> None:
    state = ready_state(context, at=2)
    worker = state.fleet.workers["generation-1"]
    worker.roles, worker.versions = frozenset(), {}
    decisions = decided(context, state, NOW)
    assert [item.worker for item in decisions if isinstance(item, d.Generate)] == ["generation-0"]
    (become,) = [item for item in decisions if isinstance(item, d.PrepareWorker)]
    weights = become.command.become_generation.weights
    assert (weights.version, [source.address for source in weights.sources]) == (2, ["host:5", "host:6"])


def test_weights_come_from_all_ranks_that_hold_a_part_of_the_first_copy(tmp_path: Path) -> None:
    parallelism = {"pipeline": 1, "data": 2, "tensor": 2}
    training = {"backend": "megatron", "parallelism": parallelism, "microBatchSize": 4}
    job = make_job(tmp_path, batch=8, training=training)
    context = job_context(job, schedule_json(job.spec))
    state = ready_state(context, at=2)
    assert [rank.name for rank in state.fleet.ranks()] == [f"training-{rank}" for rank in range(4)]
    state.fleet.workers["generation-1"].versions["actor"] = 1
    (load,) = [item for item in decided(context, state, NOW) if isinstance(item, d.PrepareWorker)]
    first = [state.fleet.workers[f"training-{rank}"].address for rank in range(2)]
    assert [source.address for source in load.command.load_weights.sources] == first


def test_training_waits_for_every_score(context: JobContext) -> None:
    state = ready_state(context, at=1)
    finish_all(state, score=False)
    assert iteration.decide(context, state, NOW).phase == "Scoring"
    assert set(kinds(decided(context, state, NOW))) == {"Score"}
    scored = ready_state(context, at=1)
    finish_all(scored)
    expected = [d.CommitBatch(), d.Train("training-0", 1), d.Train("training-1", 1)]
    assert decided(context, scored, NOW) == expected
    assert iteration.decide(context, scored, NOW).phase == "Training"


def test_ranks_never_train_while_somebody_reads_their_weights(context: JobContext) -> None:
    state = ready_state(context, at=1)
    finish_all(state)
    pend(state, "generation-0", CommandKind.LOAD, from_ranks=True)
    assert decided(context, state, NOW) == []
    state.fleet.workers["generation-0"].pending.clear()
    assert "Train" in kinds(decided(context, state, NOW))


def test_no_load_from_ranks_begins_when_a_batch_waits(context: JobContext) -> None:
    state = ready_state(context, at=1)
    finish_all(state)
    state.fleet.workers["generation-0"].versions = {"actor": 0}
    assert kinds(decided(context, state, NOW)) == ["CommitBatch", "Train", "Train"]


def test_the_next_iteration_waits_for_publishing_and_checkpoint(context: JobContext) -> None:
    state = ready_state(context, at=1)
    finish_all(state)
    for rank in state.fleet.ranks():
        rank.trained_version = 2
    assert decided(context, state, NOW) == [d.CommitTrained()]
    state.ledger.train()
    state.trained = True
    assert iteration.decide(context, state, NOW).phase == "Publishing"
    loads = decided(context, state, NOW)
    assert [(item.worker, item.model, item.version) for item in loads if isinstance(item, d.PrepareWorker)] == [
        ("generation-0", "actor", 2),
        ("generation-1", "actor", 2),
        ("inference-0", "critic", 2),
        ("inference-1", "critic", 2),
    ]
    for worker in state.fleet:
        worker.versions = dict.fromkeys(worker.versions, 2)
    assert iteration.decide(context, state, NOW).phase == "Checkpointing"
    assert decided(context, state, NOW) == [d.SaveCheckpoint(2)]
    state.checkpoint.newest = 2
    assert decided(context, state, NOW) == [d.CloseIteration()]
    state.ledger.iteration = context.spec.iterations - 1
    for worker in state.fleet:
        worker.trained_version = worker.trained_version and state.version
        worker.versions = dict.fromkeys(worker.versions, state.version)
    state.checkpoint.newest = state.version
    assert decided(context, state, NOW) == [d.CloseIteration(last=True), d.Finish("Complete")]


def test_a_lost_rank_takes_its_group_with_it(context: JobContext) -> None:
    state = ready_state(context, at=1)
    lost = state.fleet.workers["training-1"]
    state.fleet.closed("training-1", lost.session, NOW)
    assert "RestartGroup" not in kinds(decided(context, state, NOW + 1)), "a moment of grace"
    state.fleet.expire(NOW + 3)
    (restart,) = [item for item in decided(context, state, NOW + 3) if isinstance(item, d.RestartGroup)]
    assert restart == d.RestartGroup(("training-0",), "training-1 was lost", counted=False)
    exits = [item for item in decided(context, state, NOW + 3) if isinstance(item, d.ExitWorker)]
    assert exits == [d.ExitWorker("training-0", ExitCode.RESTART, "the training group restarts: training-1 was lost")]


def test_a_group_forms_from_the_checkpoint_and_replays(context: JobContext) -> None:
    state = ready_state(context, at=3)
    for rank in state.fleet.ranks():
        rank.roles, rank.trained_version = frozenset(), 0
    assert d.FormGroup(2) in decided(context, state, NOW)
    for rank in state.fleet.ranks():
        rank.roles, rank.trained_version, rank.group_epoch = frozenset({"training"}), 2, 2
    trains = [item for item in decided(context, state, NOW) if isinstance(item, d.Train)]
    assert trains == [d.Train("training-0", 2), d.Train("training-1", 2)]


def test_after_a_coordinator_restart_ranks_are_waited_for(context: JobContext) -> None:
    state = ready_state(context, at=1, absent=("training-1",))
    assert not {"FormGroup", "RestartGroup", "Train"} & set(kinds(decided(context, state, NOW)))


def test_a_training_failure_waits_for_its_explanation(context: JobContext) -> None:
    state = ready_state(context, at=1)
    rank = state.fleet.workers["training-0"]
    rank.train_failure, rank.failed_at = pb.Failure(reason="OutOfMemory", message="no memory", exit_code=1), NOW
    assert not {"Finish", "RestartGroup"} & set(kinds(decided(context, state, NOW + 1)))
    assert d.Finish("Failed", rank.train_failure) in decided(context, state, NOW + 5)
    rank.train_failure = pb.Failure(message="peer closed", retryable=True)
    (restart,) = [item for item in decided(context, state, NOW + 5) if isinstance(item, d.RestartGroup)]
    assert restart.counted
    state.group_failures = context.spec.run_policy.backoff_limit
    assert "Finish" in kinds(decided(context, state, NOW + 5))
    state.fleet.workers["training-1"].lost = True
    (restart,) = [item for item in decided(context, state, NOW + 1) if isinstance(item, d.RestartGroup)]
    assert not restart.counted


def test_stopping_finishes_the_batch_in_training_and_checkpoints(context: JobContext) -> None:
    state = ready_state(context, at=1)
    finish_all(state)
    state.stop = StopOrder(True, "asked")
    assert decided(context, state, NOW) == [d.SaveCheckpoint(1)]
    pend(state, "training-0", CommandKind.TRAIN)
    assert decided(context, state, NOW) == [d.CommitBatch(), d.Train("training-1", 1)]
    state = ready_state(context, at=0)
    state.stop = StopOrder(False, "asked")
    assert decided(context, state, NOW) == [d.Finish("Stopped")]


def test_a_stuck_worker_restarts_and_an_absent_one_fails_the_job_if_nobody_stands_in(context: JobContext) -> None:
    state = ready_state(context, absent=("generation-1",))
    state.ledger.assign(0, "generation-0")
    beat = NOW + 200
    for worker in state.fleet:
        worker.last_heard = beat
    decisions = decided(context, state, beat)
    (leave,) = [item for item in decisions if isinstance(item, d.ExitWorker)]
    assert (leave.worker, leave.code) == ("generation-0", ExitCode.RESTART)
    assert "generation-0 to decode 1 samples" in leave.reason
    assert "Finish" not in kinds(decisions), "generation-0 can decode without generation-1"
    state = ready_state(context, absent=("training-1",))
    (finish,) = [item for item in decided(context, state, NOW + 30) if isinstance(item, d.Finish)]
    assert finish.failure is not None
    assert finish.failure.message == "waited 30 s for training-1 to register"
    assert finish.failure.field == "spec.runPolicy.startTimeoutSeconds"


def test_ranks_none_of_which_finishes_a_piece_of_training_restart_though_their_clocks_run(context: JobContext) -> None:
    limit = context.spec.run_policy.start_timeout_seconds

    def told_to_restart(pieces: tuple[int, int], moved: tuple[float, float]) -> list[str]:
        """Return the workers told to restart, after these progress counts, the last `moved` seconds after Train was
        sent."""
        state = ready_state(context)
        finish_all(state)
        now = NOW + 2 * limit
        for worker in state.fleet:
            worker.last_heard = worker.last_computing = worker.last_progress = now
        for rank, count, seconds in zip(state.fleet.ranks(), pieces, moved, strict=True):
            rank.pending[7] = PendingCommand(CommandKind.TRAIN, NOW, "train iteration 0")
            rank.heartbeat, rank.last_piece = pb.Heartbeat(training_pieces=count), NOW + seconds
        decisions = [item for item in decided(context, state, now) if isinstance(item, d.ExitWorker)]
        assert all("to train iteration 0" in item.reason and item.code == ExitCode.RESTART for item in decisions)
        allowed = f"spec.runPolicy.startTimeoutSeconds allows {limit} s without progress"
        assert all(item.reason.endswith(allowed) for item in decisions), "what to change where it is only slow"
        return [item.worker for item in decisions]

    assert told_to_restart((9, 5), (limit - 1, 0)) == ["training-0", "training-1"]
    assert told_to_restart((9, 5), (limit + 1, 0)) == [], "one gets on, so the other may wait for it"
    assert told_to_restart((1, 1), (-500, -500)) == ["training-0", "training-1"], "not even the first piece"
    assert told_to_restart((0, 0), (0, 0)) == [], "the first piece is not counted yet"


def test_ranks_that_trained_before_hang_when_they_stand_still_for_much_longer_than_ever(tmp_path: Path) -> None:
    job = make_job(tmp_path, batch=8, runPolicy={"workerTimeoutSeconds": 5})
    context = job_context(job, schedule_json(job.spec))

    def restarted(moved_before: float, *, cold: bool = False) -> list[str]:
        state = ready_state(context)
        finish_all(state)
        state.fleet.pace.trained(NOW - 20, NOW - 13)
        for worker in state.fleet:
            worker.last_heard = worker.last_computing = worker.last_progress = NOW + 100
        for rank in state.fleet.ranks():
            rank.last_train = pb.TrainResult(version=1)
            rank.pending[7] = PendingCommand(CommandKind.TRAIN, NOW, "train iteration 0")
            rank.heartbeat, rank.last_piece = pb.Heartbeat(training_pieces=3), NOW + 100 - moved_before
        if cold:
            state.fleet.ranks()[1].last_train = None
        return [item.reason for item in decided(context, state, NOW + 100) if isinstance(item, d.ExitWorker)]

    reasons = restarted(75.0)
    assert len(reasons) == 2
    assert all(
        "hangTimeoutSeconds allows 70 s, as ranks always progressed much faster" in reason for reason in reasons
    ), reasons
    assert restarted(65.0) == []
    assert restarted(75.0, cold=True) == [], (
        "a new process loads and builds for minutes, again and again if it is ended"
    )


def test_the_rank_that_hangs_is_named_as_the_one_that_waits_for_none_of_the_others(context: JobContext) -> None:
    state, now = ready_state(context), NOW + 2 * context.spec.run_policy.start_timeout_seconds
    finish_all(state)
    for worker in state.fleet:
        worker.last_heard = worker.last_computing = worker.last_progress = now
    for rank, waits_for in zip(state.fleet.ranks(), ("a transfer of rank 1", ""), strict=True):
        rank.pending[7] = PendingCommand(CommandKind.TRAIN, NOW, "train iteration 0")
        rank.heartbeat, rank.last_piece = pb.Heartbeat(training_pieces=3, waits_for=waits_for), NOW
    reasons = [item.reason for item in decided(context, state, now) if isinstance(item, d.ExitWorker)]
    assert len(reasons) == 2
    assert all(reason.endswith("; of its ranks training-1 waits for none of the others") for reason in reasons), reasons
    shown = waits.descriptions(context, state, NOW + 5)
    assert "training-0 to train iteration 0, which waits for a transfer of rank 1 (5 s)" in shown, "long before that"
    for rank in state.fleet.ranks():
        rank.heartbeat = pb.Heartbeat(training_pieces=3, waits_for="ranks 0, 1 to join a reduction")
    reasons = [item.reason for item in decided(context, state, now) if isinstance(item, d.ExitWorker)]
    assert all(reason.endswith("without progress") for reason in reasons), "nobody is to blame"


@pytest.mark.parametrize("absent", [("training-1",), ("generation-0", "generation-1"), ("training-0", "inference-0")])
def test_absent_workers_whose_pods_somebody_else_sees_to_fail_nothing(
    context: JobContext, absent: tuple[str, ...]
) -> None:
    awaiting = replace(context, awaits_workers=True)
    state = ready_state(context, absent=absent)
    later = NOW + 24 * 3600
    for worker in state.fleet:
        worker.last_heard = worker.last_progress = later
    assert "Finish" not in kinds(decided(awaiting, state, later))
    assert "Finish" in kinds(decided(context, state, later)), "of a job without pods it does"
    assert f"{absent[0]} to register (86400 s)" in waits.descriptions(awaiting, state, later)


def test_failed_tasks_go_elsewhere_and_not_at_once(context: JobContext) -> None:
    state = ready_state(context)
    finish_all(state, score=False)
    ledger = state.ledger
    attempt = ledger.assign_scores(0, ["reward"], "inference-0")
    ledger.fail_score(0, attempt, "inference-0", "reward", NOW + 1)
    early = [item for item in decided(context, state, NOW) if isinstance(item, d.Score)]
    assert 0 not in [index for item in early for index, _ in item.samples]
    late = [item for item in decided(context, state, NOW + 2) if isinstance(item, d.Score)]
    (worker,) = [item.worker for item in late if (0, ("reward",)) in item.samples or _reward_of(item, 0)]
    assert worker == "inference-1"


def _reward_of(score: d.Score, index: int) -> bool:
    return any(sample == index and "reward" in tasks for sample, tasks in score.samples)


def test_a_group_task_goes_to_one_worker_and_to_another_when_that_fails_or_dies(tmp_path: Path) -> None:
    job = make_job(tmp_path, batch=4, inference={"replicas": 2})
    rank = replace(SCORE_REWARD, name="rank", scope=Scope.GROUP)
    context = replace(
        job_context(job, schedule_json(job.spec)), graph=Graph("ppo", (GENERATE, SCORE_VALUES, rank, TRAIN_ACTOR))
    )
    state = ready_state(context)
    state.ledger = ledger = Ledger(0, 4, context.tasks, 1, group_size=2)
    finish_all(state)
    groups = [item for item in decided(context, state, NOW) if isinstance(item, d.ScoreGroup)]
    assert [(item.group, item.task) for item in groups] == [(0, "rank"), (1, "rank")]
    assert {item.worker for item in groups} == {"inference-0", "inference-1"}, "the idle one gets the next group"
    attempts = [ledger.assign_group(item.group, item.task, item.worker) for item in groups]
    assert not [item for item in decided(context, state, NOW) if isinstance(item, d.ScoreGroup)]
    lost, other = (item.worker for item in groups)
    ledger.reclaim(lost)
    ledger.fail_score(2, attempts[1][2], other, "rank", NOW + 5)
    assert [item.group for item in decided(context, state, NOW) if isinstance(item, d.ScoreGroup)] == [0]
    again = {item.group: item.worker for item in decided(context, state, NOW + 6) if isinstance(item, d.ScoreGroup)}
    assert again.keys() == {0, 1}
    assert again[1] == lost, "elsewhere than where it failed"


@pytest.mark.parametrize("used_up", UsedUp)
def test_a_batch_that_no_round_could_fill_fails_the_job_only_where_that_is_wanted(
    context: JobContext, used_up: UsedUp
) -> None:
    state = ready_state(context)
    size = len(state.ledger.samples)
    state.ledger = Ledger(0, size, context.tasks, 1, group_size=size // 2, refill=RefillRule(1, used_up))
    finish_all(state)
    assert not state.ledger.all_scored, "other prompts took their place"
    finish_all(state)
    assert (state.ledger.all_scored, state.ledger.refill.missing) == (True, 2)
    finished = [item for item in decided(context, state, NOW) if isinstance(item, d.Finish)]
    assert bool(finished) == (used_up is UsedUp.FAIL)
    for item in finished:
        assert item.failure is not None
        assert (item.failure.reason, item.failure.field) == ("BatchNotFull", "spec.algorithm.ppo.refillRounds")
        assert "after 1 round 4 of 4 prompt groups of iteration 0" in item.failure.message


def test_serial_scoring_waits_for_the_whole_batch(tmp_path: Path) -> None:
    job = make_job(tmp_path, batch=8, inference={"replicas": 2, "overlap": "Disabled"})
    context = job_context(job, schedule_json(job.spec))
    state = ready_state(context)
    finish_all(state, score=False)
    assert "Score" in kinds(decided(context, state, NOW))
    state = ready_state(context)
    response = PackedResponse(b"\1\0\0\0", b"\0\0\0\0", (VersionSpan(0, 1),))
    state.ledger.finish(0, state.ledger.assign(0, "w"), "w", response, "stop", "")
    assert "Score" not in kinds(decided(context, state, NOW))


def test_groups_that_the_graph_does_not_need_do_not_exist(tmp_path: Path) -> None:
    job = make_job(tmp_path, algorithm="grpo")
    state = JobState(Fleet(job.spec, NOW), Ledger(0, 16, (), 1), fusion_state(job.spec))
    assert {worker.group for worker in state.fleet} == {Group.GENERATION, Group.INFERENCE, Group.TRAINING}
    assert job_context(job, "").scored_models == ()
    assert job_context(job, "").graph.trained == ("actor",)


def test_waits_are_sentences(context: JobContext) -> None:
    state = ready_state(context, absent=("inference-1",))
    state.fleet.workers["generation-1"].pending[1] = PendingCommand(CommandKind.LOAD, NOW, "load actor version 3")
    assert waits.descriptions(context, state, NOW + 12) == [
        "generation-1 to load actor version 3 (12 s)",
        "inference-1 to register (12 s)",
    ]
