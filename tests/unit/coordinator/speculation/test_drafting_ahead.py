"""Drafts ahead on the wire: leases under the keys of the next samples, their tokens, their ends and what they bring."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process

from rlhf_api.algorithms import samples_per_prompt
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack, unpack
from rlhf_common.samples import FIRST_AHEAD_SAMPLE
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.speculation_metrics import speculation_metrics
from rlhf_coordinator.loop.event_handlers import EventHandlers
from rlhf_coordinator.loop.leases import generation_message
from rlhf_coordinator.loop.sample_sets import BatchSamples
from rlhf_coordinator.scheduling import sibling_sharing
from rlhf_coordinator.scheduling.decisions import DraftAhead, EndDrafts, Generate, ShareSiblings
from rlhf_coordinator.speculation import drafting_ahead, sharing
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.storage.journal_pb2 import Begun
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver

WORKER, OTHER = "generation-0", "generation-1"
BATCH = 8


class DraftingJob:
    """A job with two generation workers, whose messages are read as a worker does."""

    def __init__(self, folder: Path, **spec: object) -> None:
        generation = {"replicas": 2, "maxBatchSize": 8, "speculation": {"ahead": "Auto"}}
        job = make_job(folder, batch=BATCH, **{"algorithm": "grpo", "generation": generation, **spec})  # type: ignore[arg-type]
        self.run, _ = begin_in_process(folder, job)
        self.run.journal.begin(Begun(iteration=0, coordinator_epoch=1))
        self.handlers = EventHandlers(self.run, CheckpointSaver(self.run))
        self.streams = {}
        for name in (WORKER, OTHER):
            number, worker = self.run.sessions.number(), self.run.state.fleet.workers[name]
            state = pb.WorkerState(roles=[pb.WORKER_ROLE_GENERATION], versions={"actor": 0})
            register = pb.Register(worker=name, group="generation", index=worker.index, incarnation="1", state=state)
            self.run.state.fleet.register(register, number, 0.0)
            self.run.state.fleet.beat(name, pb.Heartbeat(learns_siblings=True, decodes_ahead=True), 0.0)
            self.streams[name] = self.run.sessions.open(name, number)

    def received(self, name: str) -> list[pb.CoordinatorMessage]:
        """Return the messages that a worker got since the last call."""
        queue, messages = self.streams[name].outgoing, []
        while not queue.empty():
            message = queue.get_nowait()
            assert message is not None
            messages.append(message)
        return messages

    def lease(self, *samples: int, worker: str = WORKER) -> list[pb.GenerateSample]:
        """Lease drafts; return the worker's message."""
        drafting_ahead.lease(self.run, DraftAhead(worker, samples))
        (message,) = self.received(worker)
        return list(message.command.generate.samples)

    def says(self, kind: str, message: object, worker: str = WORKER) -> None:
        """Let a worker send a message."""
        self.handlers.message(worker, pb.WorkerMessage(**{kind: message}))  # type: ignore[arg-type]

    def begin_next(self) -> None:
        """Begin the next iteration with new weights."""
        run = self.run
        run.state.ledger = Ledger(1, BATCH, run.context.tasks, 1)
        run.state.siblings.begin_iteration()
        run.state.ahead.begin_iteration(1)


@pytest.fixture
def rig(tmp_path: Path) -> DraftingJob:
    return DraftingJob(tmp_path)


def progress(key: pb.SampleKey, tokens: list[int], *, offset: int = 0, version: int = 0) -> pb.SampleProgress:
    return pb.SampleProgress(
        key=key,
        offset=offset,
        tokens=pack(np.array(tokens, np.int32)),
        log_probabilities=pack(np.zeros(len(tokens), np.float32)),
        versions=[pb.VersionSpan(version=version, tokens=len(tokens))],
    )


def finished(key: pb.SampleKey, tokens: list[int]) -> pb.FinishedSample:
    part = progress(key, tokens)
    return pb.FinishedSample(
        key=key,
        tokens=part.tokens,
        log_probabilities=part.log_probabilities,
        versions=part.versions,
        finish_reason="stop",
        text="answer",
    )


def tokens_of(run: JobRun, index: int) -> list[int]:
    return [int(token) for token in np.frombuffer(run.state.ahead.upcoming.response(index).tokens, "<i4")]


def test_a_draft_has_prompt_and_random_key_of_its_sample(rig: DraftingJob) -> None:
    first, second = rig.lease(0, 5)
    assert (first.key.iteration, first.key.sample) == (1, FIRST_AHEAD_SAMPLE)
    rig.begin_next()
    for draft, index in ((first, 0), (second, 5)):
        own = generation_message(rig.run, BatchSamples(rig.run), index, WORKER)
        assert (draft.prompt, draft.random_key, draft.drawing) == (own.prompt, own.random_key, own.drawing)
        assert draft.max_response_tokens == own.max_response_tokens


def test_greedy_baselines_are_drafted_greedily(tmp_path: Path) -> None:
    rig = DraftingJob(tmp_path, algorithm="remax")
    size = samples_per_prompt(rig.run.context.spec)
    drawings = [draft.drawing for draft in rig.lease(*range(2 * size))]
    rig.run.state.ledger = Ledger(1, BATCH, rig.run.context.tasks, 1, group_size=size, greedy_baseline=True)
    own = [generation_message(rig.run, BatchSamples(rig.run), index, WORKER).drawing for index in range(2 * size)]
    assert drawings == own == ([pb.DRAWING_ROLLOUT] * (size - 1) + [pb.DRAWING_GREEDY]) * 2


def test_tokens_come_with_progress_with_the_end_and_with_a_withdrawal_and_lead_on(rig: DraftingJob) -> None:
    first, second = rig.lease(0, 1)
    rig.says("progress", progress(first.key, [1, 2]))
    rig.says("progress", progress(first.key, [3], offset=2))
    rig.says("progress", progress(first.key, [9], offset=7))
    assert tokens_of(rig.run, 0) == [1, 2, 3], "what comes after a gap is left out"
    rig.says("finished", finished(second.key, [4, 5]))
    drafting_ahead.end(rig.run, EndDrafts(WORKER))
    (message,) = rig.received(WORKER)
    assert list(message.command.withdraw.keys) == [first.key], "the other one has ended"
    assert rig.run.state.ahead.since == {}
    answer = pb.WithdrawResult(samples=[progress(first.key, [1, 2, 3, 6])])
    rig.says("done", pb.CommandDone(command_id=message.command.id, withdraw=answer))
    (again,) = rig.lease(0, worker=OTHER)
    assert unpack(again.tokens).tolist() == [1, 2, 3, 6]
    assert again.key.attempt > first.key.attempt
    rig.says("progress", progress(first.key, [8], offset=4))
    assert tokens_of(rig.run, 0) == [1, 2, 3, 6], "of an older lease"
    assert rig.run.state.ahead.drafted == rig.run.totals.ahead_drafted == 6
    assert not [record for record in rig.run.journal.read(0) if not record.HasField("begun")], "nothing is journaled"


def test_a_draft_whose_worker_was_lost_or_that_failed_is_not_leased_again(rig: DraftingJob) -> None:
    first, _ = rig.lease(0, 1)
    rig.says("progress", progress(first.key, [1, 2]))
    rig.says("failed", pb.FailedSample(key=first.key, failure=pb.Failure(reason="NotFinite", message="nan")))
    assert list(rig.run.state.ahead.upcoming.waiting(3)) == [2]
    assert rig.run.state.ahead.upcoming.on(WORKER) == [1]
    drafting_ahead.worker_lost(rig.run, WORKER)
    assert list(rig.run.state.ahead.upcoming.waiting(3)) == [2]
    assert tokens_of(rig.run, 0) == [1, 2], "what it reported stays"
    assert rig.run.state.failure is None
    rig.lease(2, worker=OTHER)
    rig.run.state.fleet.workers[OTHER].session = 0
    drafting_ahead.end(rig.run, EndDrafts(OTHER))
    assert list(rig.run.state.ahead.upcoming.waiting(4)) == [3], "a draft may be what ended its worker"


@pytest.mark.parametrize("version", [1, -1])
def test_impossible_versions_are_refused(rig: DraftingJob, version: int) -> None:
    (draft,) = rig.lease(0)
    with pytest.raises(ValueError, match="a draft of sample 0 of iteration 1 has weight versions"):
        rig.says("progress", progress(draft.key, [1], version=version))


def test_workers_get_the_drafts_of_their_samples_before_the_lease(rig: DraftingJob) -> None:
    first, second = rig.lease(0, BATCH - 1)
    rig.says("finished", finished(first.key, [1, 2, 3]))
    rig.says("finished", finished(second.key, [4, 5]))
    rig.begin_next()
    for decision in sibling_sharing.decide(rig.run.context, rig.run.state, -1.0, [Generate(OTHER, (0, 1))]):
        assert isinstance(decision, ShareSiblings)
        sharing.share(rig.run, decision)
    (message,) = rig.received(OTHER)
    (delta,) = message.siblings.deltas
    assert (delta.iteration, delta.sample, delta.weight) == (1, FIRST_AHEAD_SAMPLE, 1.0)
    assert unpack(delta.tokens).tolist() == [1, 2, 3]


def test_the_metrics_say_how_much_of_a_draft_was_right(rig: DraftingJob) -> None:
    (draft,) = rig.lease(0)
    rig.says("finished", finished(draft.key, [1, 2, 3, 4]))
    assert speculation_metrics(rig.run)["ahead/drafted_tokens"] == 4
    rig.begin_next()
    sample = rig.run.state.ledger.samples[0]
    key = pb.SampleKey(iteration=1, sample=0, attempt=rig.run.state.ledger.assign(0, WORKER))
    part = finished(key, [1, 2, 7])
    part.versions[0].version = 1
    rig.says("finished", part)
    assert len(sample.response) == 3
    metrics = {name: value for name, value in speculation_metrics(rig.run).items() if name.startswith("ahead/")}
    assert metrics.pop("ahead/right_share_age_1") == pytest.approx(2 / 3)
    assert metrics == {
        "ahead/drafted_tokens": 0.0,
        "ahead/compared_tokens": 3.0,
        "ahead/right_tokens": 2.0,
        "ahead/parted_samples": 1.0,
        "ahead/idle_seconds": 0.0,
    }
    assert (rig.run.totals.ahead_compared, rig.run.totals.ahead_right) == (3, 2)
    assert rig.run.totals.ahead_seconds > 0


def test_a_coordinator_that_restarts_knows_no_draft_and_begins_new_ones(tmp_path: Path) -> None:
    rig = DraftingJob(tmp_path)
    (draft,) = rig.lease(0)
    rig.says("progress", progress(draft.key, [1, 2]))
    rig.run.journal.close()
    again = DraftingJob(tmp_path)
    assert again.run.state.ahead.upcoming.iteration == 1
    assert not again.run.state.ahead.upcoming.drafts
    again.says("progress", progress(draft.key, [3], offset=2))
    assert again.run.totals.ahead_drafted == 0
