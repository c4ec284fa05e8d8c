"""Which prompts ranks add before the batch is complete: whole chunks, in a journaled order that a replay repeats."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.coordinator.coordinated import make_job, make_prompts
from tests.support.coordinator.job_states import NOW, decided, finish_all, kinds, pend, ready_state

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.samples import VersionSpan
from rlhf_coordinator.loop.command_results import CommandResults
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling.gradient_streaming import ready_groups
from rlhf_coordinator.scheduling.training_group import SUSPECT_SECONDS
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.fleet import Cause, Refused
from rlhf_coordinator.state.gradient_chunks import chunk_numbers, groups_per_chunk
from rlhf_coordinator.state.job_state import JobContext, JobState, StopOrder, job_context
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse, SampleState
from rlhf_coordinator.state.worker import CommandKind, PendingCommand
from rlhf_coordinator.storage.batch import apply_record, batch_parts, chunk_parts
from rlhf_coordinator.storage.journal_pb2 import Record, Streamed

BATCH, SIZE = 24, 4
"""Samples of a batch, and of a prompt."""
STREAM = (d.StreamGroups, d.Accumulate)


def context_of(folder: Path, stream: str = "Enabled", *, deterministic: bool = True, micro: int = 2) -> JobContext:
    """Return a job of six prompts with two data parallel ranks; by default a chunk is one prompt."""
    job = make_job(
        folder,
        batch=BATCH,
        algorithm="grpo",
        training={"parallelism": {"data": 2}, "microBatchSize": micro, "stream": stream},
        deterministic=deterministic,
    )
    document = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"]["algorithm"]["grpo"]["miniBatchSize"] = BATCH
    job = RLHFJob.model_validate(document)
    return job_context(job, schedule_json(job.spec))


def state_of(context: JobContext) -> JobState:
    state = ready_state(context)
    state.ledger = Ledger(0, BATCH, context.tasks, 1, group_size=SIZE)
    return state


def finish(ledger: Ledger, *groups: int) -> None:
    """Finish and score every sample of these prompts."""
    response = PackedResponse(b"\1\0\0\0", b"\0\0\0\0", (VersionSpan(0, 1),))
    for group in groups:
        for sample in ledger.members_of(group):
            ledger.finish(sample.index, ledger.assign(sample.index, "w"), "w", response, "stop", "")
            for task in sorted(sample.open_tasks):
                attempt = ledger.assign_scores(sample.index, [task], "w")
                ledger.score(sample.index, attempt, "w", task, b"\0" * 4)


def streaming(context: JobContext, state: JobState) -> list[d.Decision]:
    """Return the decisions on gradients before the batch is complete."""
    return [item for item in decided(context, state, NOW) if isinstance(item, STREAM)]


def test_a_chunk_fills_micro_batches_on_every_rank(tmp_path: Path) -> None:
    assert [groups_per_chunk(context_of(tmp_path, micro=micro).spec) for micro in (1, 2, 4, 6)] == [1, 1, 2, 3]
    assert groups_per_chunk(context_of(tmp_path, "Disabled").spec) == 0


def test_complete_prompts_are_journaled_and_then_computed_by_every_rank(tmp_path: Path) -> None:
    context = context_of(tmp_path, micro=4)
    state = state_of(context)
    assert streaming(context, state) == []
    finish(state.ledger, 0)
    assert streaming(context, state) == [], "half a chunk"
    finish(state.ledger, 1, 2)
    assert streaming(context, state) == [d.StreamGroups((0, 1))]
    state.ledger.streamed += [0, 1]
    both = [d.Accumulate(f"training-{rank}", 0, 1) for rank in range(2)]
    assert streaming(context, state) == both
    first, second = state.fleet.ranks()
    first.streamed = 0, 1
    finish(state.ledger, 3)
    assert streaming(context, state) == both[1:], "the next chunk waits for every rank"
    pend(state, second.name, CommandKind.ACCUMULATE)
    assert streaming(context, state) == []
    second.pending.clear()
    second.streamed = 0, 1
    assert streaming(context, state) == [d.StreamGroups((2, 3))]


def test_nothing_streams_after_the_last_score_in_a_stop_or_with_a_rank_elsewhere(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    state = state_of(context)
    finish(state.ledger, 0)
    assert streaming(context, state)
    assert not streaming(context_of(tmp_path, "Disabled"), state)
    state.stop = StopOrder(checkpoint=True, reason="")
    assert not streaming(context, state)
    state.stop = None
    rank = state.fleet.workers["training-1"]
    rank.trained_version = 1
    assert not streaming(context, state)
    rank.trained_version, rank.group_epoch = 0, 2
    assert not streaming(context, state)
    rank.group_epoch = 1
    finish_all(state)
    assert kinds(decided(context, state, NOW)) == ["CommitBatch", "Train", "Train"]


def test_gradients_in_progress_keep_a_rank_at_its_version_and_serving(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    state = state_of(context)
    finish(state.ledger, 0)
    state.ledger.streamed.append(0)
    rank = state.fleet.workers["training-0"]
    pend(state, rank.name, CommandKind.ACCUMULATE)
    assert rank.serves(0)
    assert not rank.idle
    finish_all(state)
    trains = [item.worker for item in decided(context, state, NOW) if isinstance(item, d.Train)]
    assert trains == ["training-1"], "the other follows when it is idle"


def test_a_rank_that_connects_again_is_asked_for_all_chunks(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    state = state_of(context)
    finish(state.ledger, 0, 1)
    state.ledger.streamed += [0, 1]
    for rank in state.fleet.ranks():
        rank.streamed = 0, 2
    assert streaming(context, state) == []
    state.fleet.workers["training-1"].forget()
    register = pb.Register(worker="training-1", group="training", index=1, incarnation="5", accumulates=True)
    register.state.CopyFrom(pb.WorkerState(roles=[pb.WORKER_ROLE_TRAINING], group_epoch=1))
    state.fleet.register(register, 99, NOW)
    assert streaming(context, state) == [d.Accumulate("training-1", 0, 2)]
    register.state.busy, register.state.command_id, register.state.command = True, 7, "accumulate"
    state.fleet.register(register, 100, NOW)
    (pending,) = state.fleet.workers["training-1"].pending.values()
    assert pending.kind is CommandKind.ACCUMULATE


def test_a_rank_that_hangs_in_gradients_restarts_like_a_rank_that_trains(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    state = state_of(context)
    state.fleet.pace.trained(NOW - 1.0, NOW)
    for rank in state.fleet.ranks():
        rank.last_train = pb.TrainResult(version=0)
        rank.heartbeat.training_pieces = 3
        pend(state, rank.name, CommandKind.ACCUMULATE)
    limit = state.fleet.pace.limit(context.spec.run_policy.hang_timeout_seconds, 20.0)
    assert not [item for item in decided(context, state, NOW + limit - 1) if isinstance(item, d.ExitWorker)]
    exits = [item for item in decided(context, state, NOW + limit + 1) if isinstance(item, d.ExitWorker)]
    assert {item.worker for item in exits} == {"training-0", "training-1"}
    assert all(item.stuck for item in exits)


def test_gradients_that_fail_break_the_training_group(tmp_path: Path) -> None:
    assert CommandResults._of_rank(PendingCommand(CommandKind.ACCUMULATE, NOW, "compute gradients"))
    context = context_of(tmp_path)
    state = state_of(context)
    rank = state.fleet.workers["training-1"]
    rank.train_failure, rank.failed_at = pb.Failure(message="no memory", retryable=True), NOW
    finish(state.ledger, 0)
    assert not streaming(context, state)
    restart, *exits = decided(context, state, NOW + SUSPECT_SECONDS + 1)[:3]
    assert isinstance(restart, d.RestartGroup)
    assert [item.worker for item in exits if isinstance(item, d.ExitWorker)] == ["training-0", "training-1"]


def test_a_rank_of_a_release_without_streaming_is_refused(tmp_path: Path) -> None:
    for stream, refused in (("Enabled", True), ("Disabled", False)):
        fleet = ready_state(context_of(tmp_path, stream), absent=("training-0",)).fleet
        register = pb.Register(worker="training-0", group="training", index=0, incarnation="new")
        result = fleet.register(register, 50, NOW)
        assert isinstance(result, Refused) is refused
        if isinstance(result, Refused):
            assert result.cause is Cause.INCOMPATIBLE
            assert "spec.training.stream" in result.reason


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_order_of_the_sum_survives_a_replay_and_is_that_of_the_numbers_in_a_deterministic_job(
    tmp_path: Path, data: st.DataObject
) -> None:
    deterministic, micro = data.draw(st.booleans()), data.draw(st.sampled_from([1, 2, 4, 6]))
    context = context_of(tmp_path, deterministic=deterministic, micro=micro)
    state = state_of(context)
    ledger, per_chunk = state.ledger, groups_per_chunk(context.spec)
    records, groups = list[Record](), BATCH // SIZE
    for group in data.draw(st.permutations(range(groups))):
        finish(ledger, group)
        for decision in streaming(context, state) if data.draw(st.booleans()) else ():
            assert isinstance(decision, d.StreamGroups)
            assert all(
                sample.state is SampleState.SCORED for group in decision.groups for sample in ledger.members_of(group)
            )
            ledger.streamed.extend(decision.groups)
            records.append(Record(streamed=Streamed(groups=decision.groups)))
            for rank in state.fleet.ranks():
                rank.streamed = 0, len(ledger.streamed) // per_chunk
    assert len(ledger.streamed) % per_chunk == 0
    assert len(set(ledger.streamed)) == len(ledger.streamed)
    numbers = chunk_numbers(ledger.streamed, groups, per_chunk)
    assert sorted(numbers) == [1 + place // per_chunk for place in range(groups)]
    if deterministic:
        assert ledger.streamed == list(range(len(ledger.streamed)))
        assert numbers == chunk_numbers([], groups, per_chunk), "clocks do not matter"
    replayed = Ledger(0, BATCH, context.tasks, 1, group_size=SIZE)
    finish(replayed, *range(groups))
    for record in records:
        apply_record(replayed, record)
    prompts = make_prompts(context.job)
    (whole,) = batch_parts(ledger, prompts, per_chunk)
    assert list(batch_parts(replayed, prompts, per_chunk)) == [whole]
    assert [sample.chunk for sample in whole.samples] == [number for number in numbers for _ in range(SIZE)]
    for chunk in range(1, len(ledger.streamed) // per_chunk + 1):
        (alone,) = chunk_parts(replayed, prompts, per_chunk, chunk)
        in_whole = [sample for sample in whole.samples if sample.chunk == chunk]
        assert sorted(alone.samples, key=lambda sample: sample.sample) == in_whole


def test_a_chunk_that_is_not_journaled_has_no_samples(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    ledger = state_of(context).ledger
    finish(ledger, 0)
    ledger.streamed.append(0)
    for chunk in (2, -1):
        with pytest.raises(ValueError, match=f"none in {chunk}"):
            list(chunk_parts(ledger, make_prompts(context.job), 1, chunk))


def test_in_order_prompts_wait_for_those_before_them(tmp_path: Path) -> None:
    ledger = state_of(context_of(tmp_path)).ledger
    finish(ledger, 0, 2, 5)
    ledger.give_up(4)
    assert ready_groups(ledger, in_order=False) == [0, 2, 5]
    assert ready_groups(ledger, in_order=True) == [0]
    ledger.streamed.append(0)
    assert ready_groups(ledger, in_order=True) == []
    finish(ledger, 3)
    assert ready_groups(ledger, in_order=False) == [2, 3, 5]
